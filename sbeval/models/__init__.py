"""The model family: one Hugging Face decoder for stick-breaking attention and the softmax baselines.

- `config`: `SbevalConfig`, its fields and their checks
- `presets`: configurations with the paper's model sizes
- `decoder`: transformer block, `SbevalModel` and `SbevalForCausalLM`
- `pretrained`: base class of both: loading, weight initialisation, choice of kernels
- `mlp`: MLP and mixture of experts
- `attention`: attention layer: projections, KV cache, mixer (stick-breaking, softmax or entmax), gates and norms
- `norms`: norms of the residual stream, and of the queries, keys and outputs of heads
- `positions`: position ids, padding and packing of one forward pass
- `softmax`: causal softmax attention of the baselines
- `packed_softmax`: causal softmax attention within each of several texts packed into one row
- `slots`: KV cache with one fixed-size slot for each text, and attention of a decode step over it
- `flex`: FlexAttention: when it is used, and how it is compiled
- `biases`: ALiBi, NAPE and FIRE
- `entmax`: entmax-1.5 attention, and the scales of queries of SSMax and ASEntmax
- `forgetting`: forget gates and token shifts of the Forgetting Transformer
- `rope`: rotary embeddings with frequencies that are computed for each request
- `extrapolation`: SelfExtend, dual chunk attention and other ways to exceed a RoPE model's training length
- `learned_positions`: number of positions of a model with learned position embeddings
- `kernels`: Triton kernels other than attention

Importing this package registers `model_type: "sbeval"` with AutoConfig, AutoModel and AutoModelForCausalLM.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from sbeval.models.config import SbevalConfig
from sbeval.models.decoder import SbevalForCausalLM, SbevalModel
from sbeval.models.presets import preset

AutoConfig.register("sbeval", SbevalConfig, exist_ok=True)
AutoModel.register(SbevalConfig, SbevalModel, exist_ok=True)
AutoModelForCausalLM.register(SbevalConfig, SbevalForCausalLM, exist_ok=True)

__all__ = ["SbevalConfig", "SbevalForCausalLM", "SbevalModel", "preset"]
