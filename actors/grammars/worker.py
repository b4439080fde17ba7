"""The processes behind a `GrammarHost`: one that has xgrammar and the vocabulary loaded, and what it forks.

    keeper ──fork──► a room for each constraint: compiles it, tries it out, keeps it
                        └──fork──► a matcher for each request: its masks, step by step

A room is the compiled grammar's cache; its matchers share its memory. Each room and each matcher sets itself a timer of
processor time before it enters xgrammar, and the kernel ends it when that is used up, wherever in C++ it is: nothing
else could. What they hold in memory is limited the same way. Fork, not threads: one that stands still cannot be
stopped. No process here has a second thread when it forks, so forking one is safe.

A room compiles and tries out in a thread of a higher niceness, which has ended before it forks matchers: a step waits
for those, and what a process has once given up of its priority it does not get back.

Messages are JSON, one a packet; what is large, or a process's own, comes as a file descriptor beside it. A process ends
when its socket does. Started by ``python -m outrider.actors.grammars.worker SOCKET``.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import re
import resource
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NoReturn, TypeVar

import numpy as np

from outrider.actors.grammars.bounds import Allowance, Bounds

LARGEST_MESSAGE = 256 << 10
SMALL_MESSAGE = 4 << 10
"""The largest of those that a step waits for."""

WALKS, TOKENS_A_WALK = 3, 24
PROBE_S = 0.25
"""Processor time after which the trying out ends, whatever it has seen."""

OVERRAN = 3
"""Exit code of a matcher that used up what it may."""

Result = TypeVar("Result")


def main(arguments: list[str]) -> None:
    control = socket.socket(fileno=int(arguments[0]))
    message, fds = receive(control)
    assert message is not None
    import xgrammar  # seconds, since it imports torch; every process forked from here has it

    vocabulary = xgrammar.TokenizerInfo.deserialize_json(read_all(fds[0]).decode())
    lengths = np.array([len(text) for text in vocabulary.decoded_vocab], dtype=np.int32)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    gc.collect()
    gc.freeze()  # so that a fork's collections do not copy what is shared
    send(control, {"ready": True})
    _Keeper(control, Bounds(**message["bounds"]), vocabulary, lengths).run()


class _Keeper:
    """Forks rooms, and ends them when it is told to: a parent knows that a pid is still its child's."""

    def __init__(self, control: socket.socket, bounds: Bounds, vocabulary: Any, lengths: Any) -> None:
        self._control, self._bounds, self._vocabulary, self._lengths = control, bounds, vocabulary, lengths
        self._rooms: dict[int, int] = {}
        self._used_s: dict[int, float] = {}
        """Of rooms that ended by themselves: nobody has asked for it yet."""

    def run(self) -> None:
        while True:
            message, fds = receive(self._control)
            self._reap()
            if message is None:
                for pid in self._rooms.values():
                    os.kill(pid, signal.SIGKILL)
                return
            if message["do"] == "end":
                used_s = self._end(message["room"])
                if message["tell"]:
                    send(self._control, {"room": message["room"], "used": used_s})
                continue
            pid = os.fork()
            if pid == 0:
                self._control.close()
                _Room(socket.socket(fileno=fds[0]), self._bounds, self._vocabulary, self._lengths).run(
                    message, read_all(fds[1]).decode(errors="surrogatepass")
                )
            self._rooms[message["room"]] = pid
            for fd in fds:
                os.close(fd)

    def _end(self, room: int) -> float:
        """The processor time it has used."""
        if (pid := self._rooms.pop(room, None)) is None:
            return self._used_s.pop(room, 0.0)
        os.kill(pid, signal.SIGKILL)
        usage = os.wait4(pid, 0)[2]
        return usage.ru_utime + usage.ru_stime

    def _reap(self) -> None:
        for room, pid in list(self._rooms.items()):
            ended, _, usage = os.wait4(pid, os.WNOHANG)
            if ended:
                del self._rooms[room]
                self._used_s[room] = usage.ru_utime + usage.ru_stime


_COMPILER_PLACE = re.compile(r"^\[[\d:]+\] \S+:\d+: ")


def said_by(error: Exception) -> str:
    """What the compiler says of a constraint, on one line, without its clock and the line of its own source."""
    return _COMPILER_PLACE.sub("", " ".join(str(error).split()))[:2000]


def lacks_memory(error: Exception) -> bool:
    """The compiler's own errors come through with no type of theirs."""
    return isinstance(error, MemoryError) or "std::bad_alloc" in str(error)


class _Room:
    """One constraint."""

    def __init__(self, own: socket.socket, bounds: Bounds, vocabulary: Any, lengths: Any) -> None:
        self._own, self._bounds, self._vocabulary, self._lengths = own, bounds, vocabulary, lengths
        self._words = (vocabulary.vocab_size + 31) // 32
        self._matchers: dict[int, int] = {}
        """Their numbers, by process."""

    def run(self, message: dict[str, Any], spec: str) -> NoReturn:
        import xgrammar

        try:
            grammar = in_background(message["nice"], lambda: self._compile(xgrammar, message, spec))
            if grammar is not None:
                self._fork_matchers(xgrammar, grammar)
        except (OSError, MemoryError):
            pass  # the engine does not listen any more, or the limit of memory: the end of the socket says it
        except BaseException:  # noqa: BLE001 - of this room or of a matcher; nothing of it may get back to the keeper
            traceback.print_exc()
        finally:
            os._exit(0)

    def _compile(self, xgrammar: Any, message: dict[str, Any], spec: str) -> Any:
        """The grammar, None where it is refused; the engine has been told."""
        with suppress(RuntimeError):
            xgrammar.Grammar.from_ebnf("(")  # what a thread needs to raise is allocated once; without, it aborts
        limit_memory(self._bounds.compile_bytes)
        before = own_bytes()
        set_timer(self._bounds.compile_s)
        try:
            grammar = compiled(xgrammar, self._vocabulary, message["kind"], spec, message["any_whitespace"])
        except Exception as error:  # noqa: BLE001 - whatever the compiler raises is about the constraint
            send(self._own, {"no_memory": True} if lacks_memory(error) else {"invalid": said_by(error)})
            return None
        grown = max(grammar.memory_size_bytes, own_bytes() - before)
        if grown > self._bounds.keep_bytes:
            send(self._own, {"too_large": grown})
            return None
        set_timer(0)
        send(self._own, {"compiled": grown})
        if (slow_s := self._slow_mask(xgrammar, grammar)) is not None:
            send(self._own, {"slow": slow_s})
            return None
        set_timer(0)
        return grammar

    def _slow_mask(self, xgrammar: Any, grammar: Any) -> float | None:
        """What the masks took by which a request would have overdrawn its allowance, on walks of the grammar's own: at
        random, along short tokens, along long ones. It finds what is slow wherever one goes, early, so that its sender
        hears at once; what is slow in a corner only is for the matcher's timer."""
        mask = np.zeros((1, self._words), dtype=np.int32)
        began = time.process_time()
        for walk in range(WALKS):
            random = np.random.default_rng(walk)
            allowance = Allowance(self._bounds.mask_burst_s, self._bounds.mask_refill_s)
            matcher = xgrammar.GrammarMatcher(grammar)
            for _ in range(TOKENS_A_WALK):
                start = time.process_time()
                set_timer(allowance.left_s)
                matcher.fill_next_token_bitmask(mask, 0)
                token = self._next_token(mask, walk, random)
                on = token is not None and matcher.accept_token(token) and not matcher.is_terminated()
                set_timer(0)
                now = time.process_time()
                if not allowance.spend(now - start):
                    return now - start
                if not on or now - began > PROBE_S:
                    break
        return None

    def _next_token(self, mask: Any, walk: int, random: Any) -> int | None:
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed < len(self._lengths)]
        stops = np.isin(allowed, self._vocabulary.stop_token_ids)
        if not stops.all():
            allowed = allowed[~stops]
        if not len(allowed):
            return None
        if walk == 1:
            allowed = allowed[self._lengths[allowed] == self._lengths[allowed].min()]
        if walk == 2:
            allowed = allowed[self._lengths[allowed] == self._lengths[allowed].max()]
        return int(random.choice(allowed))

    def _fork_matchers(self, xgrammar: Any, grammar: Any) -> None:
        gc.collect()
        gc.freeze()
        signal.signal(signal.SIGCHLD, lambda *_: self._reap())
        send(self._own, {"ready": time.process_time()})
        while True:
            message, fds = receive(self._own)
            if message is None:
                return
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # until it is known whose the process is
            pid = os.fork()
            if pid == 0:
                self._own.close()
                limit_memory(self._bounds.matcher_bytes)
                os._exit(OVERRAN if self._overruns(xgrammar, grammar, message, fds) else 0)
            self._matchers[pid] = message["matcher"]
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGCHLD])
            for fd in fds:
                os.close(fd)

    def _overruns(self, xgrammar: Any, grammar: Any, message: dict[str, Any], fds: list[int]) -> bool:
        """A matcher's life, and whether it ended by what it used."""
        try:
            matcher = xgrammar.GrammarMatcher(grammar, override_stop_tokens=message["stop"] or None)
            own, words = socket.socket(fileno=fds[0]), self._words
            return _Matcher(own, fds[1], message["words"], words, self._bounds, matcher).run()
        except Exception as error:
            if lacks_memory(error):
                return True
            raise

    def _reap(self) -> None:
        """Tells the engine of matchers that ended by their own use, of which their sockets' ends do not tell."""
        with suppress(ChildProcessError, OSError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                number = self._matchers.pop(pid, None)
                if os.waitstatus_to_exitcode(status) in (OVERRAN, -signal.SIGPROF):
                    self._own.send(json.dumps({"overran": number}).encode(), socket.MSG_DONTWAIT)


class _Matcher:
    """One request. Masks are written into memory that the engine reads: a row of words for each position."""

    def __init__(
        self, own: socket.socket, memory: int, words: int, vocabulary_words: int, bounds: Bounds, matcher: Any
    ) -> None:
        self._own, self._matcher = own, matcher
        self._vocabulary_mask = np.empty((1, vocabulary_words), dtype=np.int32)
        self._masks = np.frombuffer(mmap.mmap(memory, 0), dtype=np.int32).reshape(-1, words)
        self._allowance = Allowance(bounds.mask_burst_s, bounds.mask_refill_s)
        self._spent_s = 0.0
        """In this step: one that fills masks begins the next."""

    def run(self) -> bool:
        """Whether it ends because it has used up its allowance."""
        while True:
            message, _ = receive(self._own)
            if message is None:
                return False
            set_timer(max(self._allowance.left_s - self._spent_s, 1e-3))
            start = time.process_time()
            answer = self._answer(message)
            used_s = time.process_time() - start
            set_timer(0)
            self._spent_s += used_s
            if "fill" in message:
                masks = 1 + len(message["fill"]["tokens"])
                answer.update(used=self._spent_s, masks=masks)
                enough = self._allowance.spend(self._spent_s, masks)
                self._spent_s = 0.0
                if not enough:
                    return True
            send(self._own, answer)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        for token in message["accept"]:
            if not self._matcher.is_terminated() and not self._matcher.accept_token(token):
                return {"refused": token}
        if "fill" in message:
            self._fill(**message["fill"])
            return {}
        return {"valid": self._valid(message["validate"])}

    def _valid(self, tokens: Iterable[int]) -> int:
        """How many of the tokens the grammar goes along with."""
        accepted = 0
        for token in tokens:
            if self._matcher.is_terminated() or not self._matcher.accept_token(token):
                break
            accepted += 1
        if accepted:
            self._matcher.rollback(accepted)
        return accepted

    def _fill(self, tokens: list[int], grammar_start: int, constraint_start: int) -> None:
        """A row for each drafted token, and one behind them: what may stand there. Rows before constraint_start allow
        everything; tokens before grammar_start are none of the grammar's. Rows behind a draft that the grammar refuses
        are as that draft's own."""
        accepted = 0
        last: int | None = None
        for row in range(len(tokens) + 1):
            if last is not None:
                self._masks[row] = self._masks[last]
                continue
            if row >= constraint_start and not self._matcher.is_terminated():
                self._fill_row(self._masks[row])
            else:
                self._masks[row] = -1
            if row < len(tokens) and row >= grammar_start:
                if not self._matcher.is_terminated() and self._matcher.accept_token(tokens[row]):
                    accepted += 1
                else:
                    last = row
        if accepted:
            self._matcher.rollback(accepted)

    def _fill_row(self, mask: Any) -> None:
        """A model may have more ids than its tokenizer, or fewer: those that mean nothing are not allowed."""
        self._matcher.fill_next_token_bitmask(self._vocabulary_mask, 0)
        words = min(len(mask), self._vocabulary_mask.shape[1])
        mask[:words] = self._vocabulary_mask[0, :words]
        mask[words:] = 0


def compiled(xgrammar: Any, vocabulary: Any, kind: str, spec: str, any_whitespace: bool) -> Any:
    """xgrammar's CompiledGrammar. One thread: what a constraint costs is one core's time, and forks stay safe."""
    compiler = xgrammar.GrammarCompiler(vocabulary, max_threads=1, cache_enabled=False)
    if kind == "json":
        separators = None if any_whitespace else (",", ":")
        return compiler.compile_json_schema(spec, any_whitespace=any_whitespace, separators=separators)
    if kind == "ebnf":
        return compiler.compile_grammar(spec)
    if kind == "lark":
        return compiler.compile_lark(spec)
    if kind == "regex":
        return compiler.compile_regex(spec)
    tag = json.loads(spec)
    if "structures" not in tag:
        return compiler.compile_structural_tag(spec)
    items = [
        xgrammar.StructuralTagItem(begin=item["begin"], schema=json.dumps(item["schema"]), end=item["end"])
        for item in tag["structures"]
    ]
    return compiler.compile_structural_tag(items, tag["triggers"])


def in_background(niceness: int, work: Callable[[], Result]) -> Result:
    """work's result, of a thread of that niceness, or of this one's where that is higher. It has ended, for the kernel
    too, when this returns. Raises what work does."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        own = threading.get_native_id()
        try:
            os.setpriority(os.PRIO_PROCESS, own, max(niceness, os.getpriority(os.PRIO_PROCESS, own)))
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    while len(os.listdir("/proc/self/task")) > 1:
        time.sleep(0.0005)
    if errors:
        raise errors[0]
    return results[0]


def set_timer(seconds: float) -> None:
    """Of this process's processor time; the kernel ends the process when it is over. 0: none."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def limit_memory(more: int) -> None:
    """Beyond what this process has."""
    pages = int(open("/proc/self/statm").read().split()[0])  # noqa: SIM115 - closed at once, being temporary
    most = pages * mmap.PAGESIZE + more
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def own_bytes() -> int:
    """Of this process's memory that is not shared with a file or another process, roughly."""
    fields = open("/proc/self/statm").read().split()  # noqa: SIM115
    return (int(fields[1]) - int(fields[2])) * mmap.PAGESIZE


def read_all(fd: int) -> bytes:
    os.lseek(fd, 0, os.SEEK_SET)
    with os.fdopen(os.dup(fd), "rb") as file:
        return file.read()


def send(channel: socket.socket, message: dict[str, Any], fds: Iterable[int] = ()) -> None:
    """Raises OSError."""
    socket.send_fds(channel, [json.dumps(message).encode()], list(fds))


def receive(channel: socket.socket, most: int = LARGEST_MESSAGE) -> tuple[dict[str, Any] | None, list[int]]:
    """None at the end. Raises OSError."""
    try:
        data, fds, _, _ = socket.recv_fds(channel, most, 4)
    except ConnectionResetError:
        return None, []
    return (json.loads(data) if data else None), list(fds)


if __name__ == "__main__":
    main(sys.argv[1:])
