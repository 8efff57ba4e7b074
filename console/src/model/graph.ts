import type { Step } from './types'

export interface Node {
  id: string
  column: number
  row: number
  /** The step, or none for the tensors of the requests and responses. */
  step?: Step
  index: number
  tensors: string[]
}

export interface Edge {
  from: string
  to: string
  tensors: string[]
}

export interface Graph {
  nodes: Node[]
  edges: Edge[]
  columns: number
  rows: number
}

/** Places the steps of an ensemble in columns, each after the steps that it needs. */
export function layout(steps: Step[], inputs: string[], outputs: string[]): Graph {
  const writers = new Map<string, number>()
  steps.forEach((step, index) => Object.values(step.outputs).forEach((tensor) => writers.set(tensor, index)))
  const columns = new Map<number, number>()
  const column = (index: number, above: number[] = []): number => {
    if (columns.has(index)) return columns.get(index)!
    if (above.includes(index)) return 1
    const before = Object.values(steps[index]!.inputs).flatMap((tensor) => writers.get(tensor) ?? [])
    const place = 1 + Math.max(0, ...before.map((step) => column(step, [...above, index])))
    columns.set(index, place)
    return place
  }
  steps.forEach((_, index) => column(index))
  const last = Math.max(0, ...columns.values()) + 1

  const filled = new Map<number, number>()
  const nodes: Node[] = steps.map((step, index) => {
    const at = columns.get(index)!
    const row = filled.get(at) ?? 0
    filled.set(at, row + 1)
    return { id: `step${index}`, column: at, row, step, index, tensors: [] }
  })
  nodes.unshift({ id: 'in', column: 0, row: 0, index: -1, tensors: inputs })
  nodes.push({ id: 'out', column: last, row: 0, index: -1, tensors: outputs })
  const rows = Math.max(1, ...filled.values())
  for (const node of nodes) {
    const count = node.step ? filled.get(node.column)! : 1
    node.row += (rows - count) / 2
  }

  const edges = new Map<string, Edge>()
  const connect = (from: string, to: string, tensor: string) => {
    const edge = edges.get(`${from}>${to}`) ?? { from, to, tensors: [] }
    if (!edge.tensors.includes(tensor)) edge.tensors.push(tensor)
    edges.set(`${from}>${to}`, edge)
  }
  const source = (tensor: string) => (writers.has(tensor) ? `step${writers.get(tensor)}` : 'in')
  steps.forEach((step, index) => Object.values(step.inputs).forEach((tensor) => connect(source(tensor), `step${index}`, tensor)))
  outputs.forEach((tensor) => connect(source(tensor), 'out', tensor))
  return { nodes, edges: [...edges.values()], columns: last + 1, rows }
}
