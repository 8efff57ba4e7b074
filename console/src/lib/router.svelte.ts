// The page is in the fragment of the address, so that the server serves one file.

export interface Route {
  /** The parts of the path, decoded: ['models', 'NAME']. */
  parts: string[]
  query: URLSearchParams
}

function parse(): Route {
  const [path = '', query = ''] = location.hash.replace(/^#\/?/, '').split('?')
  return { parts: path.split('/').filter(Boolean).map(decodeURIComponent), query: new URLSearchParams(query) }
}

let current: Route = $state.raw(parse())
addEventListener('hashchange', () => {
  const before = current.parts[0] + '/' + current.parts[1]
  current = parse()
  if (before !== current.parts[0] + '/' + current.parts[1]) scrollTo(0, 0)
})

export const route = () => current

export function href(parts: (string | number)[], query: Record<string, string> = {}): string {
  const text = new URLSearchParams(query).toString()
  return '#/' + parts.map((part) => encodeURIComponent(part)).join('/') + (text ? `?${text}` : '')
}

export function go(parts: (string | number)[], query: Record<string, string> = {}): void {
  location.hash = href(parts, query)
}

/** Changes the query of the address without a new entry in the browser's history. */
export function setQuery(name: string, value: string): void {
  const query = new URLSearchParams(current.query)
  if (value) query.set(name, value)
  else query.delete(name)
  history.replaceState(null, '', href(current.parts, Object.fromEntries(query)))
  current = parse()
}
