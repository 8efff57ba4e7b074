// What the reader has entered to be let in: an API key, and the headers of restricted APIs.  It stays in this tab.

interface Access {
  key: string
  headers: Record<string, string>
}

const NAME = 'conch.access'

function stored(): Access {
  try {
    return { key: '', headers: {}, ...JSON.parse(sessionStorage.getItem(NAME) ?? '{}') }
  } catch {
    return { key: '', headers: {} }
  }
}

export const access: Access = $state(stored())

/** Why the dialog is open: the server asks for a key, or for this header. */
export const prompt: { open: boolean; header: string; message: string } = $state({ open: false, header: '', message: '' })

export function keep(): void {
  sessionStorage.setItem(NAME, JSON.stringify(access))
}

export function accessHeaders(): Record<string, string> {
  return { ...access.headers, ...(access.key ? { Authorization: `Bearer ${access.key}` } : {}) }
}

/** Opens the dialog if a response says that something is missing. */
export function askFor(status: number, message: string): void {
  const header = /expecting header '([^']+)'/.exec(message)?.[1] ?? ''
  if (status !== 401 && !header) return
  if (!prompt.open) Object.assign(prompt, { open: true, header, message })
}
