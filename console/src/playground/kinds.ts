import type { ModelPage } from '../model/types'

export type Kind = 'chat' | 'embedding' | 'ranking' | 'transcription' | 'tensors'

export const TITLES: Record<Kind, string> = {
  chat: 'Chat',
  embedding: 'Similarity',
  ranking: 'Ranking',
  transcription: 'Transcription',
  tensors: 'Tensors',
}

/** The forms that fit a model's signature, the best one first; every model takes tensors. */
export function kindsOf(page: Pick<ModelPage, 'metadata' | 'facts' | 'decoupled'>): Kind[] {
  const inputs = new Map(page.metadata.inputs.map((tensor) => [tensor.name, tensor.datatype]))
  const outputs = new Map(page.metadata.outputs.map((tensor) => [tensor.name, tensor.datatype]))
  const kinds: Kind[] = []
  if (page.facts.chat_template === 'yes') kinds.push('chat')
  if (inputs.get('text_input') === 'BYTES' && outputs.has('embedding')) kinds.push('embedding')
  if (inputs.get('text_input') === 'BYTES' && inputs.get('text_pair') === 'BYTES' && outputs.has('score') && !outputs.has('label'))
    kinds.push('ranking')
  if (inputs.get('audio') === 'BYTES' && outputs.has('text_output')) kinds.push('transcription')
  return [...kinds, 'tensors']
}
