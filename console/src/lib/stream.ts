/** An event of a `text/event-stream`. */
export interface ServerEvent {
  event: string
  data: string
}

/** Splits the text of a `text/event-stream`, in parts of any size, into its events. */
export class EventParser {
  private rest = '';
  private event = '';
  private data: string[] = [];

  *push(text: string): Generator<ServerEvent> {
    const lines = (this.rest + text).split(/\r\n|\n/)
    this.rest = lines.pop()!
    for (const line of lines) {
      if (line === '') {
        if (this.data.length) yield { event: this.event || 'message', data: this.data.join('\n') }
        this.event = ''
        this.data = []
      } else if (line.startsWith('data:')) {
        this.data.push(line.slice(5).replace(/^ /, ''))
      } else if (line.startsWith('event:')) {
        this.event = line.slice(6).trim()
      }
    }
  }
}

/** The events of a response, as they arrive. */
export async function* eventsOf(response: Response): AsyncGenerator<ServerEvent> {
  const parser = new EventParser()
  const reader = response.body!.pipeThrough(new TextDecoderStream()).getReader()
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      yield* parser.push(value)
    }
  } finally {
    reader.cancel().catch(() => {})
  }
}
