import { SvelteMap } from 'svelte/reactivity'
import { accessHeaders } from './access.svelte'
import { ApiError, reason, send } from './api'
import { eventsOf } from './stream'

export type State = 'READY' | 'LOADING' | 'UNLOADING' | 'UNAVAILABLE' | 'UNKNOWN' | ''

/** A model version, or a model of the repository that was never loaded (an empty state). */
export interface Row {
  key: string
  name: string
  /** The number of the model's repository, if names may occur in several. */
  repository?: number
  version?: number
  state: State
  reason?: string
  serial?: number
  responsive?: boolean
  backend?: string
  engine?: string
  instances?: number
  memory?: number
  rate?: number
  failures?: number
  tokens?: number
  p50?: number | null
  p99?: number | null
  queue?: number
  in_flight?: number
  succeeded?: number
  failed?: number
  restarts?: number
  running?: number
  waiting?: number
  cache?: number
  chat?: boolean
}

export interface Totals {
  time: number
  rate: number
  failures: number
  tokens: number
  p99: number | null
  slowest: string
  queue: number
  in_flight: number
  memory: number
  machine_total: number
  machine_available: number
  cpu: number
  ready: boolean
  stopping: boolean
}

export interface About {
  id: string
  conch: string
  triton: string
  started: number
  control: 'none' | 'poll' | 'explicit' | 'on-demand'
  tick: number
}

/** Times (s since the epoch), and for each field as many values. */
export type Series = Record<string, (number | null)[]> & { time: number[] }

const HOUR = 3600
const RETRY_SECONDS = [1, 2, 4, 8]

export const overview: {
  /** Whether the stream is open; `error` says why it is not. */
  connected: boolean
  error: string
  about: About | null
  totals: Totals | null
  history: Series
} = $state({ connected: false, error: '', about: null, totals: null, history: { time: [] } })

export const rows = new SvelteMap<string, Row>()

/** Appends a point to series that cover the last hour. */
export function append(series: Series, time: number, values: Record<string, unknown>): Series {
  const first = series.time.findIndex((at) => at >= time - HOUR)
  const result = {} as Series
  for (const name of Object.keys(series.time.length ? series : { time: 0, ...values })) {
    const value = name === 'time' ? time : typeof values[name] === 'number' ? (values[name] as number) : null
    result[name] = [...(first > 0 ? series[name]!.slice(first) : (series[name] ?? [])), value] as number[]
  }
  return result
}

function take(event: string, data: any): void {
  if (event === 'server') {
    overview.about = data
  } else if (event === 'history') {
    overview.history = { time: [], ...data }
  } else if (event === 'models') {
    const keys = new Set(data.map((row: Row) => row.key))
    for (const key of [...rows.keys()]) if (!keys.has(key)) rows.delete(key)
    for (const row of data) rows.set(row.key, row)
    overview.connected = true
    overview.error = ''
  } else if (event === 'tick') {
    const { changed, removed, ...totals } = data
    overview.totals = totals
    for (const key of removed) rows.delete(key)
    for (const row of changed) rows.set(row.key, row)
    overview.history = append(overview.history, totals.time, totals)
  }
}

let controller: AbortController | null = null
let wake: () => void = () => {}

async function read(signal: AbortSignal): Promise<void> {
  const response = await send('/console/events', { signal, headers: { Accept: 'text/event-stream' } })
  for await (const { event, data } of eventsOf(response)) take(event, JSON.parse(data))
}

/** Keeps the stream open while the page is visible; a browser allows only a few connections to a server. */
export async function follow(): Promise<never> {
  document.addEventListener('visibilitychange', () => {
    if (document.hidden) controller?.abort()
    wake()
  })
  for (let attempt = 0; ; ) {
    if (document.hidden) await new Promise<void>((resolve) => (wake = resolve))
    if (document.hidden) continue
    controller = new AbortController()
    const refused = JSON.stringify(accessHeaders())
    let known: ApiError | null = null
    try {
      await read(controller.signal)
      overview.error = 'The server has closed the connection.'
    } catch (error) {
      if (error instanceof ApiError) known = error
      overview.error = reason(error)
    }
    if (overview.connected) attempt = 0
    overview.connected = false
    if (controller.signal.aborted) continue
    // What was refused is refused again until the reader enters something else.
    const seconds = RETRY_SECONDS[Math.min(attempt++, RETRY_SECONDS.length - 1)]!
    await new Promise<void>((resolve) => {
      wake = resolve
      if (!known || refused !== JSON.stringify(accessHeaders())) setTimeout(resolve, seconds * 1000)
      else if (known.status >= 500) setTimeout(resolve, seconds * 1000)
    })
  }
}

/** Tries again at once, because the reader has entered a key. */
export function reconnect(): void {
  wake()
}

export function canControl(): boolean {
  return overview.about?.control === 'explicit' || overview.about?.control === 'on-demand'
}

/** The names that models of several repositories have: clients cannot send requests to them. */
export function sharedNames(): Set<string> {
  const first = new Map<string, number | undefined>()
  const shared = new Set<string>()
  for (const { name, repository } of rows.values()) {
    if (first.has(name) && first.get(name) !== repository) shared.add(name)
    first.set(name, repository)
  }
  return shared
}
