"""A draft model's engine in memory: KV blocks hold tokens, and what is drawn is a function of what they hold.

A wrong block table, a missed copy or a stale slot changes the drawn tokens, so comparing them with `continuation`
checks all of it.
"""

from collections import OrderedDict

from outrider.actors.drafter.engine import Drawn
from outrider.actors.drafter.planner import LookaheadLimits

VOCAB = 1000
MASK = VOCAB + 1


def lookahead(ahead=True, max_side_branches=12, max_rows=128):
    """Returns limits, those of a configuration that sets none."""
    return LookaheadLimits(ahead, max_side_branches, max_rows)


def drawn_token(tokens, round_start=0, rank=0):
    """The model: the rank-th likeliest token after `tokens`, as it is drawn for a round."""
    return (hash((*tokens, -1, round_start)) + rank) % VOCAB  # of integers: the same in every process


def continuation(tokens, count, samples_q=False):
    """Return the drafts of the round that starts after `tokens`."""
    text = list(tokens)
    for _ in range(count):
        text.append(drawn_token(text, len(tokens) if samples_q else 0))
    return text[len(tokens) :]


def one_pass_continuation(tokens, count, samples_q=False):
    """The same where it is drafted in one pass: after the text, then after masks behind it."""
    start = len(tokens) if samples_q else 0
    return [drawn_token([*tokens, *[MASK] * index], start) for index in range(count)]


class MemoryEngine:
    """Implements Engine and fails on what a GPU would let pass."""

    one_pass = False

    def __init__(self, num_blocks=1000, max_model_len=500, max_num_batched_tokens=2048, block_size=4):
        self.max_model_len, self.max_num_batched_tokens = max_model_len, max_num_batched_tokens
        self.block_sizes = (block_size,)
        self.num_blocks = num_blocks
        self.free = OrderedDict.fromkeys(range(num_blocks))
        self.memory = {}
        self.committed, self.blocks, self.taken = {}, {}, set()
        self.cached = 0
        """Leading tokens of every new sequence that the prefix cache holds."""

        self.plans, self.cached_for, self.loaded = [], [], []
        self.bad_after = None
        """Draw nothing usable after texts of this length and more."""

    def start(self, request_id, token_ids, sampling):
        self.cached_for.append((sampling.tenant, sampling.adapter))
        assert request_id not in self.committed
        assert len(token_ids) < self.max_model_len
        self.committed[request_id], self.blocks[request_id] = list(token_ids), []
        size = self.block_sizes[0]
        hit = min(self.cached, (len(token_ids) - 1) // size * size)
        for start in range(0, hit, size):
            (block,) = self._taken(1)
            self.blocks[request_id].append(block)
            self.memory[block] = dict(enumerate(token_ids[start : start + size]))
        return hit

    def load_weights(self, tensors):
        self.loaded.append(dict(tensors))

    def append(self, request_id, token_ids):
        self.committed[request_id] += token_ids
        assert len(self.committed[request_id]) < self.max_model_len

    def allocate(self, request_id, num_computed, num_new, num_lookahead):
        assert num_new > 0
        assert num_computed + num_new <= len(self.committed[request_id])
        held = self.blocks[request_id]
        needed = -(-(num_computed + num_new + num_lookahead) // self.block_sizes[0]) - len(held)
        if needed > len(self.free):
            return False
        held += self._taken(needed)
        return True

    def give_back(self, request_id):
        self.free.update(dict.fromkeys(self.blocks[request_id]))
        self.blocks[request_id] = []

    def missing(self, request_id):
        return max(-(-len(self.committed[request_id]) // self.block_sizes[0]) - len(self.blocks[request_id]), 0)

    @property
    def num_free_blocks(self):
        return len(self.free)

    def block_ids(self, request_id):
        return (list(self.blocks[request_id]),)

    def take_blocks(self, count):
        if count > len(self.free):
            return None
        taken = self._taken(count)
        self.taken.update(taken)
        return taken

    def _taken(self, count):
        """Those that have been free for longest."""
        return [self.free.popitem(last=False)[0] for _ in range(count)]

    def free_blocks(self, block_ids):
        for block in block_ids:
            self.taken.remove(block)
            self.free[block] = None

    def finish(self, request_id):
        self.free.update(dict.fromkeys(self.blocks.pop(request_id)))
        del self.committed[request_id]

    def run(self, plan):
        self.plans.append(plan)
        assert plan.rows
        assert sum(row.num_fed for row in plan.rows) <= self.max_num_batched_tokens
        for copies in (plan.restores, plan.copies):
            sources = [(target, dict(self.memory.get(source, {}))) for source, target in copies]
            self.memory.update(sources)
            assert all(target not in self.free for _, target in copies), "a copy into a block that nobody holds"
        for row in plan.rows:
            for position, token in enumerate([*row.token_ids, *[MASK] * row.num_masks], row.start):
                self._slot(row, position, token)
        return [self._row(row) for row in plan.rows]

    def _slot(self, row, position, token=None):
        size = self.block_sizes[0]
        block = row.block_ids[0][position // size]
        assert block not in self.free, "KV in a block that nobody holds"
        if token is not None:
            self.memory.setdefault(block, {})[position % size] = token
        return self.memory[block][position % size]

    def _row(self, row):
        return [self._drawn(row, draw, end) for end, draw in enumerate(row.draws, len(row.token_ids) + row.start)]

    def _drawn(self, row, draw, end):
        assert end == draw.position < self.max_model_len
        text = [self._slot(row, position) for position in range(end)]
        if self.bad_after is not None and end >= self.bad_after:
            return Drawn(-1, usable=False)
        start = draw.round_start if draw.sampling.has_q else 0
        others = tuple((drawn_token(text, start, rank), 0.2 / rank) for rank in range(1, draw.alternatives + 1))
        return Drawn(drawn_token(text, start), confidence=0.7, alternatives=others)

    @property
    def kv_cache_usage(self):
        return 1 - len(self.free) / self.num_blocks
