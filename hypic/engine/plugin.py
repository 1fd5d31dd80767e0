"""Entry point of the plugin (group `sglang.srt.plugins`) and its hook table: every place where SGLang is hooked.

Read this file to know what differs from stock SGLang. Nothing else is patched, except the request models of the HTTP
front end, which `hypic.engine.http.prepare` extends before SGLang's server module is imported, and, in benchmarks with dummy
weights, what `hypic.bench.dummy` does to those.
"""

from __future__ import annotations

import os

from hypic.config import from_env
from hypic.engine import admission, forward, http, latent, lifecycle, model_classes, solved_chunks
from hypic.engine.hook import Hook, HookTable

_M = "sglang.srt.managers"
_C = "sglang.srt.mem_cache"
_SCHEDULER = f"{_M}.scheduler.Scheduler"
_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
_WORKER = f"{_M}.tp_worker.BaseTpWorker"
_WEIGHTS = "artifacts of the old weights must never be found again"

MODEL_HOOKS: tuple[Hook, ...] = (
    Hook("sglang.srt.arg_groups.overrides.supports_mamba_cache_extra_buffer", "around",
         model_classes.supports_extra_buffer, "SGLang's registry of external models has this flag, but nothing reads it",
         ("view", "model_arch")),
)  # fmt: skip
"""What the models of hypic.engine.model_classes need, whether segments are cached or not."""

SCHEDULER_HOOKS: tuple[Hook, ...] = (
    # start-up
    *MODEL_HOOKS,
    Hook("sglang.srt.server_args.ServerArgs.__post_init__", "after", lifecycle.check_server_args,
         "refuse what hypic cannot serve, and a half-applied hook table, before anything is loaded", ("self",)),
    Hook(f"{_RUNNER}.alloc_memory_pool", "before", lifecycle.allocate_arena,
         "allocate the arena before SGLang sizes its pools by what is free", ("self", "memory_pool_config")),
    Hook(f"{_RUNNER}.init_attention_backends", "after", lifecycle.attach_runtime,
         "read the loaded model's shapes and prove relocation and composition on its weights", ("self",)),
    Hook(f"{_SCHEDULER}.__init__", "after", lifecycle.attach_manager, "one LinkManager a scheduler", ("self",)),
    Hook(f"{_SCHEDULER}.init_load_inquirer", "after", lifecycle.hide_compiles_from_load,
         "load reports count clients' requests, held ones included, not compile requests", ("self",)),
    # scheduling
    Hook(f"{_SCHEDULER}._add_request_to_queue", "around", lifecycle.add_request_to_queue,
         "plan a request with segments; spawn its compile requests", ("self", "req")),
    Hook(f"{_M}.scheduler_components.request_receiver.SchedulerRequestReceiver._pull_raw_reqs", "after",
         lifecycle.take_events, "what the router and other workers say reaches all ranks with the requests", ("self",)),
    Hook(f"{_SCHEDULER}.process_input_requests", "before", lifecycle.handle_events,
         "and is ours to handle", ("self", "recv_reqs")),
    Hook(f"{_SCHEDULER}.on_idle", "after", lifecycle.wait_for_artifacts,
         "a request that waits for other workers must not keep a processor busy", ("self",)),
    Hook(f"{_SCHEDULER}.get_next_batch_to_run", "before", lifecycle.before_scheduling,
         "notice requests that left the queues (aborts, timeouts)", ("self",)),
    Hook(f"{_SCHEDULER}.process_batch_result", "after", lifecycle.after_batch_result,
         "finished compiles become artifacts; finished prefills unlock theirs", ("self", "batch", "result")),
    Hook(f"{_SCHEDULER}._abort_on_queued_limit", "around", lifecycle.abort_on_queued_limit,
         "compile requests do not count against --max-queued-requests", ("self", "recv_req")),
    Hook(f"{_SCHEDULER}.abort_request", "around", lifecycle.abort_request,
         "aborts match by prefix of the request id: compile requests are nobody's to abort", ("self", "recv_req")),
    Hook(f"{_SCHEDULER}.flush_cache", "around", lifecycle.flush_cache,
         "/flush_cache drops artifacts too, and compiles that nobody waits for", ("self",)),
    Hook(f"{_SCHEDULER}.load_lora_adapter", "after", lifecycle.after_load_adapter,
         "a name for the adapter that all workers of a cluster agree upon", ("self", "recv_req")),
    Hook(f"{_SCHEDULER}.unload_lora_adapter", "around", lifecycle.unload_adapter,
         "drop what was or still is compiled under the adapter", ("self", "recv_req")),
    Hook(f"{_M}.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output", "around",
         lifecycle.stream_output, "compile requests have no client; the first token of a linked one is there",
         ("self", "reqs", "return_logprob", "skip_req")),
    Hook(f"{_WORKER}.update_weights_from_disk", "after", lifecycle.after_weights_from_disk, _WEIGHTS, ("self", "recv_req")),
    Hook(f"{_WORKER}.update_weights_from_distributed", "after", lifecycle.after_new_weights, _WEIGHTS, ("self",)),
    Hook(f"{_WORKER}.update_weights_from_tensor", "after", lifecycle.after_new_weights, _WEIGHTS, ("self",)),
    Hook(f"{_WORKER}.update_weights_from_ipc", "after", lifecycle.after_new_weights, _WEIGHTS, ("self",)),
    # admission
    Hook(f"{_M}.schedule_policy.match_prefix_for_req", "around", admission.match_prefix_for_req,
         "the policy's radix match of a linked request uses its marked key", ("tree_cache", "req", "token_ids")),
    Hook(f"{_M}.schedule_batch.Req.init_next_round_input", "around", admission.init_next_round_input,
         "radix match under the marked key; lay out what is to be joined", ("self", "tree_cache", "cow_mamba")),
    Hook(f"{_M}.schedule_policy.PrefillAdder.add_one_req", "around", admission.add_one_req,
         "reserve KV slots of the linked part; pass over held requests", ("self", "req")),
    Hook(f"{_M}.schedule_batch.ScheduleBatch.prepare_for_extend", "around", admission.prepare_for_extend,
         "build the batch in presented order; attach the run plan", ("self",)),
    Hook(f"{_C}.allocation.alloc_for_extend", "around", admission.alloc_for_extend,
         "reserved slots in natural order, the rest from SGLang's allocator", ("batch",)),
    Hook(f"{_C}.common.maybe_cache_unfinished_req", "around", admission.maybe_cache_unfinished_req,
         "insert under the marked key; nothing between chunks", ("req", "tree_cache")),
    Hook(f"{_C}.common.release_kv_cache", "around", admission.release_kv_cache,
         "release under the marked key; unlock artifacts", ("req", "tree_cache", "is_insert")),
    # forward
    Hook("sglang.srt.model_executor.forward_batch_info.ForwardBatch.init_new", "after", forward.attach_plan,
         "natural positions; carry the run plan to the forward pass", ("batch", "model_runner")),
    Hook(f"{_RUNNER}.forward", "around", forward.forward,
         "interiors in, attention by the run plan, artifacts out", ("self", "forward_batch")),
    Hook(solved_chunks.TARGET, "after", solved_chunks.keep,
         "T of an interior is made of what SGLang's pass over its tokens solves anyway", ("k", "v", "g", "beta")),
    Hook("sglang.srt.models.deepseek_common.attention_backend_handler.AttentionBackendRegistry.get_handler", "around",
         latent.method_of_batch, "linked batches attend to the latent itself: their rows are runs, which SGLang's choice "
         "does not know", ("backend_name",)),
    Hook("sglang.srt.layers.logprob_processor.get_token_ids_logprobs", "around", lifecycle.get_token_ids_logprobs,
         "SGLang dies of a batch in which only some ask for token_ids_logprob; compile requests never do",
         ("logprobs", "token_ids_logprobs")),
)  # fmt: skip

_table: HookTable | None = None


def table() -> HookTable:
    """The plugin's hooks, those of the HTTP front end included. One table a process."""
    global _table
    if _table is None:
        _table = HookTable("hypic", (*SCHEDULER_HOOKS, *http.hooks()))
    return _table


def activate() -> None:
    """Called by SGLang in every process that loads plugins. Does nothing unless HYPIC_ENABLED=1, but that HYPIC_MODELS=1 offers
    SGLang the models that it lacks, and that a benchmark may ask for dummy weights that remember."""
    if os.environ.get("HYPIC_DUMMY_HORIZON"):
        from hypic.bench import dummy

        dummy.register()
    if from_env().enabled:
        table().register()
        model_classes.offer()
        try:
            http.prepare()
        except Exception as e:  # SGLang would only log it; the start-up check stops the server
            table().note(f"the HTTP front end: {e}")
    elif os.environ.get("HYPIC_MODELS") == "1":
        HookTable("hypic_models", MODEL_HOOKS).register()
        model_classes.offer()


def require_applied() -> None:
    """Raise UnsupportedSGLang unless the whole table is in force in this process."""
    table().require_applied()
