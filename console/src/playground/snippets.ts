// A request as the code that sends it.

export interface Sent {
  path: string
  body: unknown
  /** Whether the response is a stream of events. */
  stream?: boolean
}

export type Language = 'curl' | 'Python' | 'OpenAI' | 'tritonclient'

const MOST_CHARACTERS = 2000

/** JSON with long texts, such as files, cut off. */
function short(value: unknown, indent = 2): string {
  return JSON.stringify(value, (_, part) => (typeof part === 'string' && part.length > MOST_CHARACTERS ? part.slice(0, 40) + '…' : part), indent)
}

function python(value: unknown): string {
  return short(value, 4)
    .replace(/(^|[\s:[,])true(?=[\s,\]}]|$)/gm, '$1True')
    .replace(/(^|[\s:[,])false(?=[\s,\]}]|$)/gm, '$1False')
    .replace(/(^|[\s:[,])null(?=[\s,\]}]|$)/gm, '$1None')
}

/** The lines of keyword arguments of a call in Python. */
function keywords(body: Record<string, unknown>): string {
  return Object.entries(body)
    .map(([name, value]) => `    ${name}=${python(value).replaceAll('\n', '\n    ')},`)
    .join('\n')
}

const OPENAI: Record<string, string> = {
  '/v1/chat/completions': 'chat.completions.create',
  '/v1/embeddings': 'embeddings.create',
}

interface Tensor {
  name: string
  datatype: string
  shape: number[]
  data: unknown
}

export function languages(sent: Sent): Language[] {
  const all: Language[] = ['curl', 'Python']
  if (sent.path in OPENAI) all.push('OpenAI')
  if (/^\/v2\/models\/.*\/infer$/.test(sent.path)) all.push('tritonclient')
  return all
}

export function snippet(language: Language, sent: Sent, server: string, hasKey: boolean): string {
  const body = sent.body as Record<string, unknown>
  const key = hasKey ? 'os.environ["CONCH_API_KEY"]' : '"none"'
  switch (language) {
    case 'curl':
      return [
        `curl${sent.stream ? ' -N' : ''} ${server}${sent.path} \\`,
        ...(hasKey ? ['  -H "Authorization: Bearer $CONCH_API_KEY" \\'] : []),
        "  -H 'Content-Type: application/json' \\",
        `  -d '${short(body).replaceAll("'", "'\\''")}'`,
      ].join('\n')
    case 'Python':
      return [
        ...(hasKey ? ['import os', ''] : []),
        'import requests',
        '',
        'response = requests.post(',
        `    "${server}${sent.path}",`,
        ...(hasKey ? [`    headers={"Authorization": "Bearer " + ${key}},`] : []),
        `    json=${python(body).replaceAll('\n', '\n    ')},`,
        ...(sent.stream ? ['    stream=True,'] : []),
        ')',
        'response.raise_for_status()',
        sent.stream ? 'for line in response.iter_lines():\n    print(line.decode())' : 'print(response.json())',
      ].join('\n')
    case 'OpenAI':
      return [
        ...(hasKey ? ['import os', ''] : []),
        'from openai import OpenAI',
        '',
        `client = OpenAI(base_url="${server}/v1", api_key=${key})`,
        `response = client.${OPENAI[sent.path]}(`,
        keywords(body),
        ')',
        sent.stream
          ? 'for chunk in response:\n    if chunk.choices:\n        print(chunk.choices[0].delta.content or "", end="")'
          : 'print(response)',
      ].join('\n')
    case 'tritonclient': {
      const [, model] = /^\/v2\/models\/([^/]+)/.exec(sent.path)!
      const [, version] = /\/versions\/(\d+)/.exec(sent.path) ?? ['', '']
      const inputs = (body.inputs as Tensor[]).map((tensor, index) => {
        const type = tensor.datatype === 'BYTES' ? 'object' : NUMPY[tensor.datatype] ?? 'float32'
        return [
          `input${index} = np.array(${python(tensor.data)}, dtype=np.${type}).reshape(${JSON.stringify(tensor.shape)})`,
          `inputs.append(httpclient.InferInput("${tensor.name}", list(input${index}.shape), "${tensor.datatype}"))`,
          `inputs[-1].set_data_from_numpy(input${index})`,
        ].join('\n')
      })
      const outputs = (body.outputs as { name: string }[] | undefined) ?? []
      return [
        ...(hasKey ? ['import os', ''] : []),
        'import numpy as np',
        'import tritonclient.http as httpclient',
        '',
        `client = httpclient.InferenceServerClient("${server.replace(/^https?:\/\//, '')}")`,
        'inputs = []',
        ...inputs,
        `result = client.infer("${decodeURIComponent(model!)}", inputs${version ? `, model_version="${version}"` : ''}${hasKey ? `, headers={"Authorization": "Bearer " + ${key}}` : ''})`,
        ...(outputs.length ? outputs.map((output) => `print(result.as_numpy("${output.name}"))`) : ['print(result.get_response())']),
      ].join('\n')
    }
  }
}

const NUMPY: Record<string, string> = {
  BOOL: 'bool_', UINT8: 'uint8', UINT16: 'uint16', UINT32: 'uint32', UINT64: 'uint64', INT8: 'int8', INT16: 'int16',
  INT32: 'int32', INT64: 'int64', FP16: 'float16', FP32: 'float32', FP64: 'float64', BF16: 'float32',
}
