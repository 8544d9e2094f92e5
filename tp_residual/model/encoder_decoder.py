"""An encoder and a decoder with cross-attention, each on a residual stream of its own: two writes a layer there, three here.

The layers are the decoder's own, planned by the same residual config: `post` is the original Transformer's placement (arXiv 1706.03762),
`pre` that of its successors. Positions are rotary, in both stacks.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from tp_residual.errors import ConfigError
from tp_residual.model.attention_backend import AttentionBackend, TokenBatch
from tp_residual.model.config import ModelConfig
from tp_residual.model.cross_attention import Bidirectional, Memory
from tp_residual.model.decoder import Decoder
from tp_residual.model.layout import ModelLayout
from tp_residual.model.rope import rope_tables
from tp_residual.parallel.group import TensorParallelGroup
from tp_residual.parallel.vocabulary import VocabParallelHead
from tp_residual.residual.boundary import Boundary, Tap
from tp_residual.residual.connection import joins_of
from tp_residual.residual.stream import Stream


class EncoderDecoder(nn.Module):
    """Weights are uninitialised until loaded or initialised; parameters are those of two `Decoder`s, `encoder.` and `decoder.`.

    config: of both stacks. num_encoder_layers: config.num_hidden_layers unless given. With tied embeddings the encoder, the decoder and the
    head share one matrix.
    """

    def __init__(
        self,
        config: ModelConfig,
        group: TensorParallelGroup,
        *,
        num_encoder_layers: int | None = None,
        dtype: torch.dtype = torch.float32,
        sequence_parallel: str = "off",
        boundary: str = "auto",
    ) -> None:
        super().__init__()
        if sequence_parallel not in ("off", "on"):
            raise ConfigError(f"sequence_parallel={sequence_parallel!r} is not off or on")
        sharded = sequence_parallel == "on"
        self.config, self.group, self.dtype = config, group, dtype
        self.layout = ModelLayout.of(config, group.size, cross_attention=True)
        encoder = config if num_encoder_layers is None else config.with_layers(num_encoder_layers)
        options: Any = {"sequence_parallel": sharded, "dtype": dtype}
        self.encoder = Decoder(ModelLayout.of(encoder, group.size), group, stack="encoder", **options)
        self.decoder = Decoder(self.layout, group, stack="decoder", **options)
        if config.tie_word_embeddings:
            self.decoder.embed_tokens = self.encoder.embed_tokens
        self.lm_head = VocabParallelHead(
            self.layout.vocabulary,
            config.hidden_size,
            group,
            tied_to=self.decoder.embed_tokens if config.tie_word_embeddings else None,
            dtype=dtype,
        )
        connections = [*self.encoder.connections(), *self.decoder.connections()]
        self.boundary = Boundary(
            group,
            boundary,
            sequence_parallel=sharded,
            stream_dtype=dtype,
            output_dtype=dtype,
            norms=[stack.norm.spec for stack in (self.encoder, self.decoder) if stack.norm is not None],
            joins=joins_of(connections),
        )

    def set_step(self, seed: int, step: int) -> None:
        """As CausalLM.set_step."""
        self.encoder.sampler.set(seed, step)
        self.decoder.sampler.set(seed, step)

    def encode(self, source: TokenBatch, taps: tuple[Tap, ...] = ()) -> Memory:
        """Whole source sequences, rows as in the batches that `forward` will see."""
        rope = rope_tables(self.config, source.positions, self.dtype, None)
        stream = Stream.start(self.encoder.embed_tokens(source.token_ids), self.boundary, taps, self.encoder.embedding)
        states, _ = self.encoder(stream, rope, source, Bidirectional()).read(self.encoder.norm)
        return Memory(states, {span.row: (span.start, span.stop) for span in source.spans})

    def forward(
        self, memory: Memory, target: TokenBatch, backend: AttentionBackend, *, taps: tuple[Tap, ...] = ()
    ) -> Float[Tensor, "tokens local_vocab"]:
        """This rank's logits of the target's tokens: all at once, or one by one over a cache (then with `memory.keep()`)."""
        rope = rope_tables(self.config, target.positions, self.dtype, None)
        stream = Stream.start(self.decoder.embed_tokens(target.token_ids), self.boundary, taps, self.decoder.embedding)
        x, _ = self.decoder(stream, rope, target, backend, memory=memory).read(self.decoder.norm)
        return self.lm_head(x)
