"""How the two ends of a link know each other, and each other's frames.

Both hold the application's secret, which the registry makes and hands to whoever may call it over Ray; it is in no
message of a link. At the rendezvous each end shows that it holds it, by a keyed hash over the invitation and what both
have said, fresh numbers among it, so that nothing shown once is of use again. From the same come two keys, one a
direction, for a link whose frames are sealed: a keyed BLAKE2b (RFC 7693) over each frame and its number. A frame that
was forged, changed, repeated, left out or sent back to where it came from breaks the link.

Nothing is encrypted: whoever reads the wire reads token ids.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from outrider.cluster.link.frame import HEADER_WORDS, LENGTH_WORD, TAG_WORDS, FrameError
from outrider.cluster.link.link import Transport

SECRET_BYTES = 32
HELLO_NONCE_BYTES = 16
_PROOF_BYTES = _KEY_BYTES = 32
_TAG_BYTES = 4 * len(range(HEADER_WORDS)[TAG_WORDS])


def new_secret() -> bytes:
    return secrets.token_bytes(SECRET_BYTES)


def new_hello(address: str) -> bytes:
    """What an end says first: a fresh number, and where it is."""
    return secrets.token_bytes(HELLO_NONCE_BYTES) + address.encode()


@dataclass(frozen=True)
class Handshake:
    """What both ends know once both have said hello. Each makes one of it; they agree when nobody came in between."""

    secret: bytes = field(repr=False)
    invitation: str
    """All of it."""

    hellos: tuple[bytes, bytes]
    """The verifier's and the drafter's."""

    def proof(self, role: str) -> bytes:
        """That whoever plays this role holds the secret."""
        return self._derived("proof", role, _PROOF_BYTES)

    def proves(self, role: str, proof: bytes) -> bool:
        return hmac.compare_digest(self.proof(role), proof)

    def frame_key(self, sender: str) -> bytes:
        """For the frames that the end in this role sends."""
        return self._derived("frames", sender, _KEY_BYTES)

    def socket_word(self, role: str) -> bytes:
        """What whoever plays this role says first on a local socket."""
        return self._derived("local socket", role, _PROOF_BYTES)

    def _derived(self, use: str, role: str, size: int) -> bytes:
        derived = hashlib.blake2b(key=self.secret, digest_size=size, person=b"outrider link")
        for part in (use.encode(), role.encode(), self.invitation.encode(), *self.hellos):
            derived.update(len(part).to_bytes(8, "little"))
            derived.update(part)
        return derived.digest()


class _Sealer:
    """Tags of one direction's frames, in their order."""

    def __init__(self, key: bytes) -> None:
        self._empty = hashlib.blake2b(key=key, digest_size=_TAG_BYTES)
        self._frames = 0

    def next_tag(self, buffer: np.ndarray, used: int) -> bytes:
        """Of the next frame, whose words in use these are; whatever stands where the tag goes does not count."""
        tag = self._empty.copy()
        # Not the header's own number: that one comes round again.
        tag.update(self._frames.to_bytes(8, "little"))
        tag.update(buffer[: TAG_WORDS.start])
        tag.update(buffer[TAG_WORDS.stop : used])
        self._frames += 1
        return tag.digest()


class SealedTransport:
    """A transport whose frames carry a keyed MAC, put on and checked here. See link.Transport."""

    def __init__(self, transport: Transport, *, send_key: bytes, receive_key: bytes) -> None:
        self._transport = transport
        self._sent, self._received = _Sealer(send_key), _Sealer(receive_key)

    @property
    def backend(self) -> str:
        return self._transport.backend

    def start_send(self, buffer: np.ndarray) -> Callable[[], None] | None:
        used = HEADER_WORDS + int(buffer[LENGTH_WORD])
        buffer[TAG_WORDS] = np.frombuffer(self._sent.next_tag(buffer, used), dtype=np.int32)
        return self._transport.start_send(buffer)

    def recv(self, buffer: np.ndarray, timeout_s: float) -> None:
        """Raises FrameError for a frame that is not the peer's next one."""
        self._transport.recv(buffer, timeout_s)
        words = int(buffer[LENGTH_WORD])
        if not 0 <= words <= len(buffer) - HEADER_WORDS:
            raise FrameError(f"length: payload of {words} words in a frame of {len(buffer)}")
        tag = self._received.next_tag(buffer, HEADER_WORDS + words)
        if not hmac.compare_digest(tag, buffer[TAG_WORDS].tobytes()):
            raise FrameError("mac: this is not the next frame that the peer has sealed")
        buffer[TAG_WORDS] = 0

    def abort(self) -> None:
        self._transport.abort()
