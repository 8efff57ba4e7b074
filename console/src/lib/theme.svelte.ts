export type Theme = 'auto' | 'light' | 'dark'

const NAME = 'conch.theme'
const dark = matchMedia('(prefers-color-scheme: dark)')

export const theme: { choice: Theme; dark: boolean } = $state({
  choice: (localStorage.getItem(NAME) as Theme | null) ?? 'auto',
  dark: false,
})

function apply(): void {
  document.documentElement.dataset.theme = theme.choice
  theme.dark = theme.choice === 'dark' || (theme.choice === 'auto' && dark.matches)
}

export function choose(choice: Theme): void {
  theme.choice = choice
  localStorage.setItem(NAME, choice)
  apply()
}

dark.addEventListener('change', apply)
apply()

/** The colour of a custom property as the canvas takes it. */
export function colour(name: string): string {
  const probe = document.createElement('i')
  probe.style.color = `var(${name})`
  document.body.append(probe)
  const value = getComputedStyle(probe).color
  probe.remove()
  return value
}
