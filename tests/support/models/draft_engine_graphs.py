"""CUDA graphs of a real draft model, played on a CPU: `python draft_engine_graphs.py MODEL`. Prints one JSON object.

vLLM's own runner captures: its dispatcher gives the keys, its dummy runs make what the model and the forward context
are told. A graph here is that, kept: to replay one is to run the model again with what it was captured with, and with
nothing of the step at hand, whose values can only come through the runner's buffers. Numbers are what they were. What
a replay gives lies in one tensor a graph.

Every step is run on the KV that was there before it, first without graphs, then with them. A process of its own,
because an engine stays in the process that started it.
"""

import json
import os
import random
import sys
from dataclasses import replace

import torch

MOST_ROWS, SIZES = 12, (1, 2, 4, 8, 12, 16, 24)
"""The sizes are vLLM's for so many rows (test_engine_args.py)."""

NUM_BLOCKS, BLOCK_SIZE = 80, 32
SEQUENCES, STEPS = 9, 60
COUNTS = (1, 3, 5, 8, 9)


class PlayedGraphs:
    """Where vLLM has its CUDAGraphWrapper."""

    def __init__(self, model):
        self.model, self.captured = model, {}
        self.capturing = True
        self.replayed = None
        """What the FULL graph of the last call was captured with."""

    def __getattr__(self, name):
        return getattr(self.model, name)

    def __call__(self, **inputs):
        context = get_forward_context()
        mode, descriptor = context.cudagraph_runtime_mode, context.batch_descriptor
        self.replayed = None
        if mode is CUDAGraphMode.NONE:
            return self.model(**inputs)
        graph = mode, descriptor
        if graph not in self.captured:
            assert self.capturing, f"{graph} was not captured"
            self.captured[graph] = inputs, context, (output := self.model(**inputs))
            return output
        inputs, then, output = self.captured[graph]
        if mode is CUDAGraphMode.FULL:
            self.replayed, context = (inputs, then), then
        else:  # Between pieces attention runs as it is told now. KV may be written in them.
            context = replace(context, slot_mapping=then.slot_mapping)
        with override_forward_context(context):
            output.copy_(self.model(**inputs))
        return output


def choose_mode(runner):
    """As vLLM's runner does when it knows its attention backends; returns the mode's name."""
    compilation = runner.compilation_config
    compilation.mode, compilation.cudagraph_mode = CompilationMode.VLLM_COMPILE, CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.splitting_ops = list(compilation._attention_ops)
    compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size = list(SIZES), SIZES[-1]
    compilation.cudagraph_num_of_warmups = 1
    runner.cudagraph_dispatcher = CudagraphDispatcher(runner.vllm_config)
    backends = [{group.backend for group in groups} for groups in runner.attn_groups]
    runner._check_and_update_cudagraph_mode(backends, runner.kv_cache_config.kv_cache_groups)
    compilation.mode = CompilationMode.NONE  # the model is not compiled
    return runner.cudagraph_dispatcher.cudagraph_mode.name


def capture(runner):
    """As GPUModelRunner.capture_model, without a device. Returns the model's graphs."""
    graphs = runner.model = PlayedGraphs(runner.model)
    for mode, descriptors in runner.cudagraph_dispatcher.get_capture_descs():
        runner._capture_cudagraphs(descriptors, mode)
    graphs.capturing = False
    return graphs


class Text:
    """A sequence, or a branch of one, and its KV blocks in each group."""

    def __init__(self, length, blocks):
        self.length, self.blocks = length, blocks

    def row(self, rng, back=0, count=1):
        """Feeds again from `back` tokens before its end; other tokens than were there."""
        start = self.length - back
        self.length = start + count
        tokens = [rng.randrange(1, 250) for _ in range(count)]
        return StepRow(tokens, start, self.blocks, Draw(DraftSampling(), start + count, start))


class Comparison:
    """problems: what differs with graphs. hits: by mode, how many steps of how many rows. padded: steps that a FULL
    graph had rows of nothing in."""

    def __init__(self, engine):
        self.engine, self.worker = engine, engine._core.model_executor.driver_worker.worker
        self.runner = runner = self.worker.model_runner
        groups = [group for of_kv in runner.attn_groups for group in of_kv]
        assert all(group.backend is TensorAttention for group in groups)
        layers = runner.compilation_config.static_forward_context
        self.kv, self.writers = {}, {}
        for group in groups:
            for cache in (layers[name].kv_cache for name in group.layer_names):
                # Layers of two groups may have one memory, of which each has blocks of its own.
                self.kv[cache.data_ptr()] = cache
                self.writers.setdefault(cache.data_ptr(), set()).add(group.kv_cache_group_id)
        self.eager = PagedForward(runner)
        choose_mode(runner)
        self.graphs = capture(runner)
        engine.count_graphs()
        self.problems, self.hits, self.padded = [], {}, 0
        self.num_groups, self.free = len(runner.attn_groups), list(range(1, NUM_BLOCKS))

    def take(self, count):
        """So many blocks for each group."""
        taken = tuple(self.free[place : place + count] for place in range(0, count * self.num_groups, count))
        self.free = self.free[count * self.num_groups :]
        assert len(taken[-1]) == count
        return taken

    def snapshot(self):
        return {name: cache.clone() for name, cache in self.kv.items()}

    @torch.inference_mode()
    def step(self, name, rows, copies=()):
        self.eager.copy_blocks(copies)
        before = self.snapshot()
        expected = self.eager(rows).clone()
        after = self.snapshot()
        for memory, cache in self.kv.items():
            cache.copy_(before[memory])
        self.engine.take_graph_hits()
        READ.clear()
        drawn = self.engine.run(StepPlan(rows))
        (hit,) = self.engine.take_graph_hits()
        likeliest = self.runner.model.compute_logits(expected).argmax(-1)
        checks = {
            "what is drawn": [each.token for each in drawn] == likeliest.tolist(),
            "the graph": hit == self.hit_by(rows),
            "KV read": READ.issubset(block for row in rows for ids in row.block_ids for block in ids),
            "KV written": all(self.is_written(memory, rows, before, after) for memory in self.kv),
            "what the graph is told": self.is_told(rows),
            # Once more, for what is drawn from: it writes what is there already.
            "hidden states": torch.allclose(self.worker._paged(rows), expected, atol=1e-4),
        }
        self.problems += [f"{name}: {what}" for what, holds in checks.items() if not holds]
        of_mode = self.hits.setdefault(hit.split()[0], {})
        of_mode[len(rows)] = of_mode.get(len(rows), 0) + 1

    def hit_by(self, rows):
        total = sum(len(row.token_ids) for row in rows)
        if total > SIZES[-1]:
            return f"NONE {total}"
        return f"{'FULL' if total == len(rows) else 'PIECEWISE'} {min(size for size in SIZES if size >= total)}"

    def is_written(self, memory, rows, before, after):
        """What is fed, and nothing else."""
        # [half, blocks, places, heads, head size]
        cache, old, new = (
            torch.stack(keys_and_values(each[memory])).transpose(2, 3) for each in (self.kv, before, after)
        )
        fed = torch.zeros(cache.shape[1:3], dtype=torch.bool)
        for row in rows:
            for place in range(row.start, row.start + len(row.token_ids)):
                for group in self.writers[memory]:
                    fed[row.block_ids[group][place // BLOCK_SIZE], place % BLOCK_SIZE] = True
        right = torch.allclose(cache[:, fed], new[:, fed], atol=1e-4) and not torch.equal(new[:, fed], old[:, fed])
        return right and torch.equal(cache[:, ~fed], old[:, ~fed])

    def is_told(self, rows):
        """Replay a FULL graph: as many rows, and nothing of those after the last one."""
        if self.graphs.replayed is None:
            return not self.hit_by(rows).startswith("FULL")
        inputs, context = self.graphs.replayed
        size, count = len(inputs["input_ids"]), len(rows)
        self.padded += size > count
        return context.is_padding.tolist() == [row >= count for row in range(size)] and all(
            len(told.seq_lens) == told.num_actual_tokens == size
            and told.query_start_loc.tolist() == [min(row, count) for row in range(size + 1)]
            and not told.seq_lens[count:].any()
            and not told.block_table[count:].any()
            and told.slot_mapping[count:].eq(-1).all()
            and context.slot_mapping[layer].data_ptr() == told.slot_mapping.data_ptr()
            for layer, told in context.attn_metadata.items()
        )


def steps(of):
    rng = random.Random(3)
    texts = [Text(0, of.take(2)) for _ in range(SEQUENCES)]
    for text, count in zip(texts, (5, 31, 32, 33, 3, 20, 45, 30, 1), strict=True):
        of.step("a prompt", [text.row(rng, count=count)])
    of.step("a prompt beside others", [texts[0].row(rng, count=4), texts[1].row(rng), texts[2].row(rng)])
    for count in (9, 5, 1, 8, 3, 9, 3, 3, 5, 9):
        of.step(f"{count} rows", [text.row(rng) for text in texts[:count]])
    of.step("back", [text.row(rng, back=back) for text, back in zip(texts[:3], (1, 3, 6), strict=True)])
    branch = Text(
        texts[3].length, tuple([*ids[:1], *own] for ids, own in zip(texts[3].blocks, of.take(1), strict=True))
    )
    copies = [(ids[1], own[1]) for ids, own in zip(texts[3].blocks, branch.blocks, strict=True)]
    of.step("a branch", [texts[3].row(rng), branch.row(rng)], copies)
    of.step("a branch alone", [branch.row(rng)])
    lines = [*texts, branch]
    for number in range(STEPS):
        rows = []
        for text in rng.sample(lines, rng.choice(COUNTS)):
            if text.length > 60:
                text.length -= 25  # in what a branch has of its own
            rows.append(text.row(rng, back=min(rng.choice((0, 0, 1, 2)), text.length), count=1 + (rng.random() < 0.02)))
        of.step(f"step {number}", rows)


def main(model):
    config = DraftModelConfig(
        method="draft_model",
        model=model,
        dtype="float32",
        max_model_len=128,
        max_num_seqs=4,
        max_draft_rows=MOST_ROWS,
        kv_cache_memory_bytes=64 << 20,
        engine_args={"enable_prefix_caching": False, "num_gpu_blocks_override": NUM_BLOCKS},
    )
    of = Comparison(DraftEngine(drafter_vllm_config(config, None, None), in_process=True))
    steps(of)
    report = {"groups": of.num_groups, "problems": of.problems, "hits": of.hits, "padded": of.padded}
    Builder._cudagraph_support = AttentionCGSupport.NEVER
    print(json.dumps({**report, "without support": choose_mode(of.runner)}), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm.config import CompilationMode, CUDAGraphMode
    from vllm.forward_context import get_forward_context, override_forward_context
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

    from outrider.actors.drafter.engine import Draw, StepPlan, StepRow
    from outrider.actors.vllm_adapter.draft_engine import DraftEngine
    from outrider.actors.vllm_adapter.engine_args import drafter_vllm_config
    from outrider.actors.vllm_adapter.paged_forward import PagedForward
    from outrider.cluster.config import DraftModelConfig
    from outrider.cluster.link.messages import DraftSampling
    from tests.support.devices.tensor_attention import READ, Builder, TensorAttention, keys_and_values

    register_backend(AttentionBackendEnum.CPU_ATTN, "tests.support.devices.tensor_attention.TensorAttention")
    main(sys.argv[1])
