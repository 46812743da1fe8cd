"""The bytes of single tokens, for tokens that alone would decode to a replacement character."""

from __future__ import annotations

import re

import tokenizers

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")
# The characters that byte-level tokenizers use for bytes: printable Latin-1 characters for
# themselves, U+0100 and up for the rest.
_PLAIN = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_OTHERS = [byte for byte in range(256) if byte not in _PLAIN]
_BYTES = {chr(byte): byte for byte in _PLAIN} | {
    chr(256 + at): byte for at, byte in enumerate(_OTHERS)
}


class TokenBytes:
    """The bytes of one tokenizer's tokens. The tokenizer is byte-level, or sentencepiece with its
    space sign and byte tokens."""

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self._tokenizer = tokenizer
        self._added = {
            at: added.content for at, added in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b"ByteLevel" in decoder.__getstate__()

    def __call__(self, token: int) -> bytes:
        """Empty for an id without a token."""
        if token in self._added:
            return self._added[token].encode()
        text = self._tokenizer.id_to_token(token) or ""
        if self._byte_level and all(sign in _BYTES for sign in text):
            return bytes(_BYTES[sign] for sign in text)
        if byte := _BYTE.match(text):
            return bytes((int(byte[1], 16),))
        return text.replace("\u2581", " ").encode()
