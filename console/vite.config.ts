import { svelte } from '@sveltejs/vite-plugin-svelte'
import { defineConfig } from 'vite'

// `npx vite` serves the sources with hot reload, and takes everything else from a server of conch.
const server = process.env.CONCH_URL ?? 'http://127.0.0.1:8000'

export default defineConfig({
  base: './',
  plugins: [svelte()],
  server: { proxy: { '^/(console/(events|models)|v1|v2|rerank|health|similarity)': server } },
  build: {
    outDir: '../src/conch/frontends/http/console/static',
    emptyOutDir: true,
    target: 'es2022',
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    // Names without hashes, so that a change of the source changes few lines of the repository; the server sends an ETag.
    rollupOptions: {
      output: {
        entryFileNames: 'assets/[name].js',
        chunkFileNames: 'assets/[name].js',
        assetFileNames: 'assets/[name][extname]',
      },
    },
    reportCompressedSize: false,
  },
})
