"""The model family: one Hugging Face decoder for stick-breaking attention and the softmax baselines.

- `config`: what does a configuration say?
- `presets`: which sizes does the paper have?
- `decoder`: how do blocks and head become a model?
- `pretrained`: how is it loaded, initialised and told its kernels?
- `mlp`: what does a block do to each position alone?
- `attention`: what stands around the mixers of an attention layer?
- `norms`: how are the residual stream, and queries, keys and outputs of heads normed?
- `positions`: where are the tokens of a forward pass, and where does each padded sequence start?
- `softmax`: how do the baselines attend?
- `packed_softmax`: how do they attend within each of several texts in one row?
- `slots`: where do the keys of texts lie while tokens are generated, and how does a new position attend to them?
- `flex`: when does FlexAttention compute it?
- `biases`: what do ALiBi and FIRE add to the logits?
- `forgetting`: how do forget gates reach the logits, and what comes with them?
- `rope`: how are positions rotated, and how does a scaling hold for one request?
- `extrapolation`: how do RoPE models read beyond their training length without other weights?
- `learned_positions`: how many positions does a model with learned ones have?
- `kernels`: kernels beside attention

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
