import type { TensorInfo } from '../model/types'

export interface InputTensor {
  name: string
  datatype: string
  shape: number[]
  data: unknown[]
}

function flatten(value: unknown, into: unknown[]): number[] {
  if (!Array.isArray(value)) {
    into.push(value)
    return []
  }
  const shapes = value.map((element) => flatten(element, into))
  const first = shapes[0] ?? []
  if (shapes.some((shape) => shape.join() !== first.join())) throw new Error('the lists have different lengths')
  return [value.length, ...first]
}

/** The number of values of a shape. */
function size(shape: number[]): number {
  return shape.reduce((product, dim) => product * dim, 1)
}

/**
 * The tensor that a reader has written: a text for BYTES, numbers with spaces or commas, or JSON with nested lists.
 * Throws an Error that says what is wrong.
 */
export function parseTensor(info: TensorInfo, text: string): InputTensor {
  const trimmed = text.trim()
  const data: unknown[] = []
  let shape: number[] = []
  if (trimmed.startsWith('[')) {
    let value: unknown
    try {
      value = JSON.parse(trimmed)
    } catch {
      throw new Error('this is not valid JSON')
    }
    shape = flatten(value, data)
  } else if (info.datatype === 'BYTES') {
    data.push(text)
  } else {
    for (const word of trimmed.split(/[\s,]+/).filter(Boolean)) {
      const value = info.datatype === 'BOOL' ? { true: true, false: false }[word.toLowerCase()] : Number(word)
      if (value === undefined || Number.isNaN(value)) throw new Error(`'${word}' is not ${info.datatype === 'BOOL' ? 'true or false' : 'a number'}`)
      data.push(value)
    }
  }
  return { name: info.name, datatype: info.datatype, shape: fit(info.shape, shape, data.length), data }
}

/** The shape of `count` values: the one that was written if it fits, else the model's with one variable size. */
function fit(wanted: number[], written: number[], count: number): number[] {
  const fits = written.length === wanted.length && wanted.every((dim, index) => dim === -1 || dim === written[index])
  if (fits) return written
  const variable = wanted.flatMap((dim, index) => (dim === -1 ? [index] : []))
  const shape = wanted.map((dim) => (dim === -1 ? 1 : dim))
  const others = size(shape)
  const last = variable.at(-1)
  if (last !== undefined && others && count % others === 0) shape[last] = count / others
  if (size(shape) !== count) throw new Error(`${count} values do not fill the shape [${wanted.join(', ')}]`)
  return shape
}

/** The first values of an output tensor, and its range if it has numbers. */
export function summary(data: unknown[]): string {
  const numbers = data.filter((value) => typeof value === 'number')
  if (!numbers.length) return ''
  let low = Infinity
  let high = -Infinity
  let sum = 0
  for (const value of numbers) {
    low = Math.min(low, value)
    high = Math.max(high, value)
    sum += value
  }
  return `${low.toPrecision(4)} to ${high.toPrecision(4)}, mean ${(sum / numbers.length).toPrecision(4)}`
}
