"""What is trained in each part: the real sizes, and toy ones that walk the same path within seconds on a CPU."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """A Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool


LLAMA_1B = Shape(16, 2048, 8192, 32, 8, 64, 128_256, True)
LLAMA_3B = Shape(28, 3072, 8192, 24, 8, 128, 128_256, True)
LLAMA_8B = Shape(32, 4096, 14_336, 32, 8, 128, 128_256, False)
TOY_TIED = Shape(2, 64, 128, 4, 2, 16, 512, True)
TOY_UNTIED = Shape(2, 64, 128, 4, 2, 16, 512, False)


@dataclass(frozen=True)
class Head:
    """A loss head: tokens, hidden size, vocabulary."""

    tokens: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.tokens:,} x {self.hidden:,} x {self.vocabulary:,}"


@dataclass(frozen=True)
class Sizes:
    """Everything in which the real check and the toy differ."""

    one_b: Shape
    three_b: Shape
    eight_b: Shape
    loop_tokens: int
    """Tokens of a row in G1, which is packed full; a micro-batch is one row, as in G2 and G4."""
    lora_tokens: int
    planner_tokens: int
    offload_tokens: int
    offload_rows: int
    """Rows of a micro-batch of G5."""
    offload_accumulation: int
    first_head: Head
    small_head: Head
    large_head: Head
    warm_up: int
    steps: int
    offload_warm_up: int
    offload_steps: int
    matmul: int
    """Rows of the matrices that the device's rate is measured with."""


REAL = Sizes(
    one_b=LLAMA_1B,
    three_b=LLAMA_3B,
    eight_b=LLAMA_8B,
    loop_tokens=8192,
    lora_tokens=4096,
    planner_tokens=4096,
    offload_tokens=4096,
    offload_rows=4,
    offload_accumulation=2,
    first_head=Head(8192, 2304, 256_000),
    small_head=Head(4096, 4096, 128_256),
    large_head=Head(32_768, 4096, 128_256),
    warm_up=10,
    steps=30,
    # A step of G5 takes seconds; its bar of 2.5 needs no more of them.
    offload_warm_up=2,
    offload_steps=3,
    matmul=8192,
)

TOY = Sizes(
    one_b=TOY_TIED,
    three_b=TOY_TIED,
    eight_b=TOY_UNTIED,
    loop_tokens=64,
    lora_tokens=64,
    planner_tokens=64,
    offload_tokens=32,
    offload_rows=2,
    offload_accumulation=2,
    first_head=Head(256, 64, 2048),
    small_head=Head(64, 64, 1024),
    large_head=Head(512, 64, 1024),
    warm_up=2,
    steps=4,
    offload_warm_up=1,
    offload_steps=2,
    matmul=256,
)
