// Numbers as people read them.  Every function takes null for "not known", and returns a dash.

const DASH = '–'

/** 3 significant digits, thousands separated: 0.12, 4.5, 1,234. */
export function number(value: number | null | undefined): string {
  if (value == null || !Number.isFinite(value)) return DASH
  const size = Math.abs(value)
  if (size === 0) return '0'
  if (size >= 100) return Math.round(value).toLocaleString('en')
  return String(Number(value.toPrecision(size >= 10 ? 3 : 2)))
}

/** Milliseconds in the unit that fits: 340 µs, 12.4 ms, 1.8 s, 2 min. */
export function duration(milliseconds: number | null | undefined): string {
  if (milliseconds == null || !Number.isFinite(milliseconds)) return DASH
  if (milliseconds === 0) return '0 ms'
  if (milliseconds < 1) return `${number(milliseconds * 1000)} µs`
  if (milliseconds < 1000) return `${number(milliseconds)} ms`
  if (milliseconds < 120_000) return `${number(milliseconds / 1000)} s`
  if (milliseconds < 7_200_000) return `${Math.round(milliseconds / 60_000)} min`
  if (milliseconds < 172_800_000) return `${Math.round(milliseconds / 3_600_000)} h`
  return `${Math.round(milliseconds / 86_400_000)} days`
}

/** Bytes in binary units: 412 MiB. */
export function bytes(size: number | null | undefined): string {
  if (size == null || !Number.isFinite(size)) return DASH
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB']
  let unit = 0
  while (Math.abs(size) >= 1000 && unit < units.length - 1) {
    size /= 1024
    unit += 1
  }
  return `${number(size)} ${units[unit]}`
}

export function percent(share: number | null | undefined): string {
  if (share == null || !Number.isFinite(share)) return DASH
  const value = share * 100
  return `${value > 0 && value < 10 ? Number(value.toPrecision(2)) : Math.round(value)} %`
}

export function count(value: number, one: string, many = `${one}s`): string {
  return `${value.toLocaleString('en')} ${value === 1 ? one : many}`
}

/** The time of day of seconds since the epoch. */
export function clock(seconds: number): string {
  return new Date(seconds * 1000).toLocaleTimeString('en-GB')
}
