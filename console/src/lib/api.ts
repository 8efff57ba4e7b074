import { accessHeaders, askFor } from './access.svelte'

/** The address of this server; the console is one level below it, also behind a proxy. */
export const SERVER = new URL('..', document.baseURI).href.replace(/\/$/, '')

export class ApiError extends Error {
  constructor(
    message: string,
    readonly status: number,
  ) {
    super(message)
  }
}

/** The message of an error in the form of any of the server's APIs. */
function messageOf(text: string, status: number): string {
  try {
    const body = JSON.parse(text)
    const error = body.error ?? body.message ?? body.detail
    return typeof error === 'string' ? error : (error?.message ?? text)
  } catch {
    return text || `HTTP status ${status}`
  }
}

/** Sends a request; throws ApiError for a status other than 2xx, and TypeError if the server cannot be reached. */
export async function send(path: string, init: RequestInit = {}): Promise<Response> {
  const response = await fetch(SERVER + path, {
    cache: 'no-store',
    ...init,
    headers: { ...accessHeaders(), ...(init.headers as Record<string, string>) },
  })
  if (response.ok) return response
  const message = messageOf(await response.text(), response.status)
  askFor(response.status, message)
  throw new ApiError(message, response.status)
}

export async function getJson<T>(path: string, signal?: AbortSignal): Promise<T> {
  return (await send(path, { signal })).json()
}

export async function postJson<T>(path: string, body: unknown, signal?: AbortSignal): Promise<T> {
  const response = await post(path, body, signal)
  const text = await response.text()
  return text ? JSON.parse(text) : (undefined as T)
}

export function post(path: string, body: unknown, signal?: AbortSignal): Promise<Response> {
  return send(path, {
    method: 'POST',
    headers: { 'Content-Type': 'application/json' },
    body: JSON.stringify(body),
    signal,
  })
}

export function modelPath(name: string, version?: number | string): string {
  return encodeURIComponent(name) + (version === undefined ? '' : `/versions/${version}`)
}

export function reason(error: unknown): string {
  if (error instanceof ApiError) return error.message
  if (error instanceof TypeError) return 'The server cannot be reached.'
  return error instanceof Error ? error.message : String(error)
}
