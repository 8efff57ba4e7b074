import type { Buckets } from '../components/Histogram.svelte'
import type { Series } from '../lib/overview.svelte'

export interface TensorInfo {
  name: string
  datatype: string
  shape: number[]
}

export interface Step {
  model: string
  version: number
  /** Names of the model's tensors, and those of the ensemble. */
  inputs: Record<string, string>
  outputs: Record<string, string>
  count: number
  failed: number
  total_ns: number
  queue_ns: number
  compute_ns: number
}

export interface Variant {
  name: string
  engine: string
  precision: string
  passed: boolean
  forced: boolean
  kept: boolean
  reasons: string[]
  disk_bytes: number
  memory_bytes: number
  latency: { batch: number; tokens: number; median_ms: number }[]
  agreement: Record<string, Record<string, unknown>>
}

export interface Verdict {
  conch: string
  created: string
  source: { model: string; revision: string }
  task: string
  auto: string
  choice: string[]
  warnings: string[]
  variants: Variant[]
}

/** What does not change while a version is loaded. */
export interface ModelPage {
  name: string
  version: number
  serial: number
  metadata: { platform: string; inputs: TensorInfo[]; outputs: TensorInfo[]; versions: string[] }
  config: Record<string, unknown>
  completed: string[]
  decoupled: boolean
  max_batch_size: number
  adapters: string[]
  facts: Record<string, string>
  load_seconds: number
  optional: string[]
  labels: Record<string, string[]>
  verdict: Verdict | null
  steps: Step[]
  history: Series
}

interface Total {
  count: number
  ns: number
}

export interface Current {
  serial: number
  statistics: {
    last_inference: number
    inference_count: number
    execution_count: number
    inference_stats: Record<
      'success' | 'fail' | 'queue' | 'compute_input' | 'compute_infer' | 'compute_output' | 'cache_hit' | 'cache_miss',
      Total
    >
    batch_stats: { batch_size: number; compute_infer: Total }[]
  }
  failures: Record<string, number>
  memory: Record<string, number>
  queue: number
  in_flight: number
  sequences: number
  restarts: Record<string, number>
  workers: { name: string; pid: number; alive: boolean; stalled: boolean }[]
  work: {
    tokens: number
    padded: number
    sequences: number
    runs: number
    phases: Record<'prepare' | 'wait' | 'arrange' | 'engine' | 'respond', number>
    sequences_per_execution: Buckets
    tokens_per_execution: Buckets
  } | null
  latency: Buckets | null
  generation: {
    running: number
    waiting: number
    kv_cache_usage: number
    kv_cache_tokens: number
    kv_cache_bytes: number
    prompt_tokens: number
    generation_tokens: number
    prefix_cache_queries: number
    prefix_cache_hits: number
    preemptions: number
    finished: Record<string, number>
    histograms: Record<'first_token' | 'inter_token' | 'prompt_length' | 'generated_length', Buckets>
  } | null
  steps: Step[]
}
