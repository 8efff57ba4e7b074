// Drives the console in Chromium: node browser.mjs SCENARIO ADDRESS [FOLDER]. Prints what is wrong; the exit status is 1 then.
import { createRequire } from 'node:module'
import { readFileSync } from 'node:fs'

const require = createRequire(new URL('../../console/package.json', import.meta.url))
const { chromium } = require('playwright-core')
const axe = readFileSync(require.resolve('axe-core/axe.min.js'), 'utf8')

const [scenario, address, folder] = process.argv.slice(2)
const SWITCHES = [
  '--no-sandbox', '--disable-gpu', '--disable-quic', '--no-first-run', '--disable-background-networking',
  '--disable-component-update', '--disable-sync',
]
const problems = []
const check = (condition, text) => condition || problems.push(text)

const browser = await chromium.launch({ executablePath: process.env.CHROMIUM ?? '/usr/bin/chromium', args: SWITCHES })

/** A page whose console errors are problems; `expected` matches those that the scenario provokes. */
async function open(options = {}, expected = null) {
  const context = await browser.newContext({ viewport: { width: 1360, height: 900 }, ...options })
  const page = await context.newPage()
  page.setDefaultTimeout(40_000)
  page.on('console', (message) => {
    if (message.type() === 'error' && !expected?.test(message.text())) problems.push(`console: ${message.text()}`)
  })
  page.on('pageerror', (error) => problems.push(`error in the page: ${error.message}`))
  page.on('request', (request) => {
    const url = request.url()
    check(/^(data|blob):/.test(url) || url.startsWith(address), `a request to ${url}`)
  })
  return page
}

const go = (page, hash = '') => page.goto(`${address}/console/${hash}`)
const live = (page) => page.locator('.status', { hasText: /Live/ }).waitFor()
const model = (name, query = '') => `#/models/${name}${query}`

/** Change the server's description of the model `echo`. */
const pretend = (page, change) =>
  page.route('**/console/models/echo', async (route) => {
    const response = await route.fetch()
    await route.fulfill({ response, json: change(await response.json()) })
  })

async function findings(page, name) {
  await page.evaluate(axe)
  const { violations } = await page.evaluate(() => globalThis.axe.run(document, { resultTypes: ['violations'] }))
  for (const { id, nodes } of violations) problems.push(`${name}: axe ${id}: ${nodes[0].html.slice(0, 200)}`)
}

const PHONE = { width: 360, height: 780 }
const VIEWS = {
  light: { colorScheme: 'light' },
  dark: { colorScheme: 'dark' },
  phone: { colorScheme: 'light', viewport: PHONE },
}

/** No findings of axe, nothing wider than the screen, and a screenshot. */
async function inspect(page, name, view) {
  await findings(page, `${name}, ${view}`)
  const wider = await page.evaluate(() => document.documentElement.scrollWidth - innerWidth)
  check(wider <= 0, `${name}, ${view}: ${wider} pixels wider than the screen`)
  if (folder) await page.screenshot({ path: `${folder}/${name}-${view}.png` })
}

/** Inspects a page as it is, in all views. */
async function look(page, name) {
  for (const [view, { colorScheme, viewport = { width: 1360, height: 900 } }] of Object.entries(VIEWS)) {
    await page.emulateMedia({ colorScheme, reducedMotion: 'reduce' })
    await page.setViewportSize(viewport)
    await inspect(page, name, view)
  }
  await page.setViewportSize({ width: 1360, height: 900 })
}

/** A picture of one colour, as a file to choose. */
async function picture(page) {
  const url = await page.evaluate(() => {
    const canvas = Object.assign(document.createElement('canvas'), { width: 320, height: 200 })
    const context = canvas.getContext('2d')
    context.fillStyle = '#3b7ea1'
    context.fillRect(0, 0, 320, 200)
    return canvas.toDataURL('image/png')
  })
  return { name: 'a picture.png', mimeType: 'image/png', buffer: Buffer.from(url.split(',')[1], 'base64') }
}

const scenarios = {
  /** Every page in both themes and on a phone: no findings of axe, no error, nothing wider than the screen. */
  async pages() {
    const pages = {
      overview: ['', 'tbody tr'],
      model: [model('echo'), '.tiles'],
      ensemble: [model('chain', '?tab=steps'), 'svg .node'],
      configuration: [model('echo', '?tab=configuration'), 'li.completed'],
      conversion: [model('echo', '?tab=conversion'), 'table b'],
      log: [model('echo', '?tab=log'), '[role=log] p'],
      playground: ['#/playground/echo', 'form textarea'],
      missing: ['#/nowhere', 'h1'],
    }
    for (const [view, options] of Object.entries(VIEWS)) {
      const page = await open({ ...options, reducedMotion: 'reduce' })
      for (const [name, [hash, selector]] of Object.entries(pages)) {
        await page.goto('about:blank')
        await go(page, hash)
        await page.locator(selector).first().waitFor()
        await live(page)
        await inspect(page, name, view)
      }
      await page.context().close()
    }
  },

  /** The pictures of the documentation, from the models of `conch demo`; `make pictures` runs this. */
  async pictures() {
    const page = await open({ colorScheme: 'light', reducedMotion: 'reduce' })
    const take = async (name, height) => {
      await page.setViewportSize({ width: 1360, height })
      await page.screenshot({ path: `${folder}/${name}.png` })
      await page.goto('about:blank')
    }
    await go(page)
    await page.locator('.tiles', { hasText: /\d\/s/ }).waitFor()
    await page.locator('tbody tr').nth(5).waitFor()
    await take('console', 800)
    await go(page, model('minilm_ensemble', '?tab=steps'))
    await page.locator('svg .node').first().waitFor()
    await take('console_steps', 600)
    await go(page, '#/playground/smollm2')
    await page.getByLabel('Temperature').fill('0')
    await page.getByLabel('Message', { exact: true }).fill('What is the capital of Japan?')
    await page.keyboard.press('Enter')
    await page.getByText('first token after').waitFor()
    await take('console_chat', 640)
    await go(page, '#/playground/minilm')
    await page.getByRole('button', { name: 'Compare' }).click()
    await page.getByText('vectors of').waitFor()
    await take('console_similarity', 480)
  },

  /** Everything can be reached with the keyboard, and the page says where the focus is. */
  async keyboard() {
    const page = await open()
    await go(page)
    await live(page)
    await page.keyboard.press('/')
    await page.keyboard.type('cha')
    await page.locator('tbody tr').nth(1).waitFor({ state: 'detached' })
    await page.keyboard.press('Tab')
    for (let step = 0; step < 30; step += 1) {
      const text = await page.evaluate(() => document.activeElement?.textContent?.trim())
      if (text === 'chain') break
      await page.keyboard.press('Tab')
    }
    await page.keyboard.press('Enter')
    await page.getByRole('heading', { name: 'chain' }).waitFor()
    await page.getByRole('tab', { name: 'Statistics' }).focus()
    await page.keyboard.press('ArrowRight')
    await page.locator('svg .node').first().waitFor()
  },

  /** A model is unloaded, loaded and reloaded. */
  async control() {
    const page = await open({}, /404/)
    await go(page, model('other'))
    await page.getByRole('button', { name: 'Load', exact: true }).click()
    await page.getByRole('button', { name: 'Reload' }).waitFor()
    await page.getByRole('button', { name: 'Unload' }).click()
    await page.locator('.state', { hasText: 'Unloaded' }).waitFor()
    await page.getByRole('button', { name: 'Load', exact: true }).waitFor()
  },

  /** Tensors go to a model and come back, and the request is shown as code. */
  async tensors() {
    const page = await open()
    await go(page, '#/playground/echo')
    await page.getByLabel('IN', { exact: true }).fill('1 two')
    await page.getByText("'two' is not a number").waitFor()
    await page.getByLabel('IN', { exact: true }).fill('1 2.5 4')
    await page.getByRole('button', { name: 'Run' }).click()
    await page.getByLabel('Values of OUT').getByText('1, 2.5, 4').waitFor()
    await page.getByText('This request as code').click()
    for (const [language, part] of [['curl', '/v2/models/echo/infer'], ['Python', 'requests.post'], ['tritonclient', 'InferInput("IN"']]) {
      await page.getByRole('button', { name: language }).click()
      check((await page.getByLabel('Code', { exact: true }).textContent()).includes(part), `${language} lacks ${part}`)
    }
    await page.getByRole('button', { name: 'Run' }).hover()
    await findings(page, 'a button under the pointer')
  },

  /** A chat of 10,000 tokens arrives whole, and the page stays usable. The server's part is played here. */
  async stream() {
    const page = await open()
    await pretend(page, (body) => ({ ...body, facts: { ...body.facts, chat_template: 'yes' } }))
    const words = Array.from({ length: 10_000 }, (_, index) => ` w${index}`)
    const chunk = (delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\n\n`
    const body = words.map((content) => chunk({ content })).join('') + 'data: [DONE]\n\n'
    await page.route('**/v1/chat/completions', (route) => route.fulfill({ contentType: 'text/event-stream', body }))
    await go(page, '#/playground/echo')
    await page.getByLabel('Message', { exact: true }).fill('Hello')
    await page.keyboard.press('Enter')
    await page.getByText('first token after').waitFor()
    const text = await page.locator('li.assistant .text').textContent()
    check(text === words.join(''), `the text has ${text.length} characters, not ${words.join('').length}`)
    await findings(page, 'chat')
    await page.getByText('This request as code').click()
    const code = await page.getByLabel('Code', { exact: true }).textContent()
    check(code.includes('"Hello"') && !code.includes('w17'), 'the code is not that of the request')
    await page.getByRole('button', { name: 'New conversation' }).click()
    await page.getByText('Send a message').waitFor()
  },

  /** A picture is shown before it is sent, in a chat and in the form of any model with a text input. */
  async files() {
    const page = await open()
    const inputs = [{ name: 'image', datatype: 'BYTES', shape: [-1, 1] }]
    await pretend(page, (body) => ({ ...body, metadata: { ...body.metadata, inputs }, facts: { chat_template: 'yes' } }))
    const chunks = [{ content: 'A blue rectangle.' }, { tool_calls: [{ index: 0, id: '1', function: { name: 'paint', arguments: '{"colour":"blue"}' } }] }]
    const events = chunks.map((delta) => `data: ${JSON.stringify({ choices: [{ index: 0, delta }] })}\n\n`)
    let sent = null
    await page.route('**/v1/chat/completions', (route) => {
      sent = route.request().postDataJSON()
      return route.fulfill({ contentType: 'text/event-stream', body: events.join('') + 'data: [DONE]\n\n' })
    })
    await go(page, '#/playground/echo')
    const file = await picture(page)
    await page.locator('input[type=file]').setInputFiles(file)
    await page.getByAltText('To send').waitFor()
    await page.getByLabel('Message', { exact: true }).fill('What is this?')
    await page.keyboard.press('Enter')
    await page.getByText('paint(').waitFor()
    check(sent.messages[0].content[1].image_url.url.endsWith(file.buffer.toString('base64')), 'another picture is sent')
    await look(page, 'chat')
    await page.getByRole('button', { name: 'Tensors' }).click()
    await page.locator('input[type=file]').setInputFiles(file)
    await page.getByAltText('Content of a picture.png').waitFor()
    const width = await page.getByAltText('Content of a picture.png').evaluate((image) => image.decode().then(() => image.naturalWidth))
    check(width === 320, `the picture shown is ${width} pixels wide`)
    check((await page.locator('form textarea').count()) === 0, 'base64 is shown')
    await look(page, 'picture')
    await page.route('**/v2/models/echo/infer', (route) => {
      sent = route.request().postDataJSON()
      return route.fulfill({ json: { outputs: [{ name: 'label', datatype: 'BYTES', shape: [1], data: ['blue'] }] } })
    })
    await page.getByRole('button', { name: 'Run' }).click()
    await page.getByLabel('Values of label').waitFor()
    check(sent.inputs[0].data[0] === file.buffer.toString('base64'), 'another picture is sent as a tensor')
    await page.getByRole('button', { name: 'Remove' }).click()
    await page.getByText('Missing: image').waitFor()
  },

  /** Models of two repositories with one name have pages of their own; `alone` is in the second one only. */
  async shared() {
    const page = await open()
    await go(page)
    await page.locator('tr', { hasText: 'repository 2' }).waitFor()
    await look(page, 'shared')
    await page.locator('tr', { hasText: 'repository 2' }).getByRole('link', { name: 'echo' }).click()
    await page.getByText('ensembles can, with').waitFor()
    await page.locator('.tiles').waitFor()
    check((await page.getByRole('link', { name: 'Try it' }).count()) === 0, 'a model that no client can name is offered to try')
    await page.getByRole('tab', { name: 'Configuration' }).click()
    await page.getByText('second').first().waitFor()
    await look(page, 'shared_model')
    await go(page, '#/playground')
    await page.getByLabel('Model', { exact: true }).waitFor()
    const offered = await page.getByLabel('Model', { exact: true }).locator('option').allTextContents()
    check(offered.join() === 'alone', `the playground offers ${offered}`)
  },

  /** Models that take a pair of texts rank if they return a score, and do not if they return labels. */
  async forms() {
    const tensors = (...names) => names.map((name) => ({ name, datatype: 'BYTES', shape: [-1, 1] }))
    for (const [outputs, ranks] of [[['score'], 1], [['label', 'score'], 0]]) {
      const page = await open()
      const metadata = { inputs: tensors('text_input', 'text_pair'), outputs: tensors(...outputs) }
      await pretend(page, (body) => ({ ...body, metadata: { ...body.metadata, ...metadata } }))
      await go(page, '#/playground/echo')
      await page.locator('form, section').first().waitFor()
      await page.getByText('This request as code').waitFor()
      const buttons = await page.getByRole('button', { name: 'Ranking' }).count()
      check(buttons === ranks, `${outputs}: ${buttons} forms rank`)
      if (ranks) {
        const results = [0.02, 0.97, 0.11].map((relevance_score, index) => ({ index, relevance_score }))
        await page.route('**/v1/rerank', (route) => route.fulfill({ json: { results } }))
        await page.getByRole('button', { name: 'Rank', exact: true }).click()
        await page.getByText('3 documents in').waitFor()
        await look(page, 'ranking')
      }
      await page.context().close()
    }
  },

  /** The console asks for a key, and uses it. */
  async keys() {
    const page = await open({}, /401|Unauthorized/)
    await go(page)
    await page.getByLabel('API key', { exact: true }).fill('secret')
    await page.getByRole('button', { name: 'Use' }).click()
    await live(page)
    await page.getByText('echo').first().waitFor()
  },

  /** A model that loads is shown as loading, and then as ready. */
  async loading() {
    const page = await open({}, /ERR_CONNECTION/)
    // The port opens some time after the start of the process.
    for (let attempt = 0; attempt < 100; attempt += 1) {
      if (await go(page).then(() => true, () => false)) break
      await page.waitForTimeout(300)
    }
    await page.locator('tr', { hasText: 'slow' }).locator('.state', { hasText: 'Loading' }).waitFor()
    await page.locator('tr', { hasText: 'slow' }).locator('.state', { hasText: 'Ready' }).waitFor()
  },

  /** A server that disappears is noticed, and so is its return. The caller restarts it after each line of output. */
  async reconnect() {
    const page = await open({}, /ERR_CONNECTION|Failed to load|ERR_INCOMPLETE|network/i)
    await go(page)
    await live(page)
    console.log('stop it')
    await page.getByRole('alert').waitFor()
    console.log('start it')
    await live(page)
    check((await page.getByRole('alert').count()) === 0, 'the alert stays')
  },

  /** Two hundred models are listed, found and sorted. */
  async many() {
    const page = await open()
    await go(page)
    await page.locator('tbody tr').nth(200).waitFor()
    await page.getByRole('searchbox').fill('chain_117')
    await page.locator('tbody tr').nth(1).waitFor({ state: 'detached' })
    await page.getByRole('link', { name: 'chain_117' }).waitFor()
    await page.getByRole('searchbox').fill('')
    await page.getByRole('button', { name: 'Model', exact: true }).click()
    await page.locator('tbody tr').first().getByText('echo').waitFor()
    const second = await page.locator('tbody tr').nth(1).getByRole('link').textContent()
    check(second === 'chain_199', `${second} comes before chain_199`)
    await look(page, 'many')
  },
}

try {
  await scenarios[scenario]()
} catch (error) {
  problems.push(String(error.message))
}
await browser.close()
for (const problem of new Set(problems)) console.error(problem)
process.exit(problems.length ? 1 : 0)
