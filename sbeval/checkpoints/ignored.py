"""Lists of configuration keys, by format, that do not affect evaluation.

A list maps a key to the values with which it has no effect; None means any value. A key that is neither read nor listed
is an error (`ConfigValues.refuse_unread`), since it might change every number. tests/checkpoints/config_keys.py
collects the keys that public sources ever declared, from their histories; run that script again to find keys that were
added since.
"""

from collections.abc import Sequence
from typing import Any

Ignored = dict[str, Sequence[Any] | None]


def _only(names: str, values: Sequence[Any] | None) -> Ignored:
    return dict.fromkeys(names.split(), values)


def _any_value(names: str) -> Ignored:
    return _only(names, None)


TRANSFORMERS: Ignored = {
    # origin of the model, names of its tasks and outputs, storage and implementation
    **_any_value(
        """model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path name_or_path
        _commit_hash _from_auto use_cache return_dict output_hidden_states output_attentions torchscript use_bfloat16
        tf_legacy_loss finetuning_task id2label label2id num_labels problem_type tokenizer_class prefix
        task_specific_params gradient_checkpointing chunk_size_feed_forward attn_implementation _attn_implementation
        _attn_implementation_autoset is_decoder sep_token_id decoder_start_token_id keys_to_ignore_at_inference"""
    ),
    # the length of answers and sampling are options of an evaluation
    **_any_value("max_length do_sample temperature top_k top_p typical_p output_scores return_dict_in_generate"),
    **_only("is_encoder_decoder add_cross_attention tie_encoder_decoder", (False, None)),
    **_only("cross_attention_hidden_size quantization_config", (None,)),
    "pruned_heads": ({}, None),
    # older versions of transformers wrote generation settings here; only generation_config.json is read
    **_only("early_stopping remove_invalid_values", (False, None)),
    **_only("min_length no_repeat_ngram_size encoder_no_repeat_ngram_size", (0, None)),
    **_only("num_beams num_beam_groups num_return_sequences", (1, None)),
    **_only("repetition_penalty length_penalty", (1.0, None)),
    "diversity_penalty": (0.0, None),
    **_only(
        """bad_words_ids forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty suppress_tokens
        begin_suppress_tokens""",
        (None,),
    ),
}

# dropout and initialisation affect training only; attention_head_type replaces multi_query
DOLOMITE_FLAT: Ignored = {
    **_any_value("resid_pdrop embd_pdrop attn_pdrop initializer_range init_method multi_query"),
    # affect rounding only
    **_any_value("attention_softmax_in_fp32 scale_attention_softmax_in_fp32 upcast_logits_for_loss"),
    "forget_gate": (False,),
}
DOLOMITE_FLAT_MIXTURE: Ignored = _any_value("router_aux_loss_coef output_router_logits")
DOLOMITE_BLOCKS: Ignored = _any_value(
    """embedding_dropout initializer_range init_method embedding_init_method use_depth_scaled_init router_aux_loss_coef
    upcast_logits_for_loss"""
)
DOLOMITE_BLOCK: Ignored = _any_value("dropout softmax_dropout")
DOLOMITE_YARN: Ignored = _any_value(
    "type beta_fast beta_slow extrapolation_factor attn_factor attention_factor finetuned"
)
"""Keys within RoPE's scaling, of which dolomite-engine reads only two."""
DOLOMITE_ROPE: Ignored = _any_value("rope_theta rope_scaling rope_parameters rope_dim")
"""Keys of RoPE, ignored in models without rotary embeddings."""

FLA: Ignored = {
    # the width of the MLP is taken from its tensors; kernels and losses affect rounding only
    **_any_value(
        """hidden_ratio intermediate_size initializer_range fuse_norm fuse_swiglu fuse_cross_entropy
        fuse_linear_cross_entropy use_l2warp"""
    ),
    "elementwise_affine": (True,),
    "window_size": (None,),
}
FLA_FORGETTING: Ignored = {**FLA, "attnres_block_size": (None,)}
FOX: Ignored = {
    # the width of the MLP is taken from its tensors; decay_time_* and fgate_bias_init are initial values; pruning
    # changes results by no more than rounding does
    **_any_value(
        """hidden_ratio intermediate_size initializer_range fuse_norm fuse_cross_entropy log_pruning_tolerance
        decay_time_min decay_time_max fgate_bias_init"""
    ),
    "elementwise_affine": (True,),
    # the original code ignores these keys, so another value suggests that another model was intended
    "attention_bias": (False,),
    "window_size": (None,),
}
_FORGETTING_KEYS = ("log_pruning_tolerance", "decay_time_min", "decay_time_max", "fgate_bias_init", "window_size")
FOX_SOFTMAX: Ignored = {key: values for key, values in FOX.items() if key not in _FORGETTING_KEYS}
FOX_SOFTMAX["qk_norm"] = (False,)  # the key existed until March 2025
FOX_STICKBREAKING: Ignored = {
    # the width of the MLP is taken from its tensors; the code reads the last line and computes nothing of it
    **_any_value(
        """hidden_ratio intermediate_size initializer_range fuse_norm fuse_cross_entropy
        normalize_attention use_k_shift use_v_shift window_size"""
    ),
    # a field of the fork's training configuration
    "elementwise_affine": (True,),
}
MODULEFORMER: Ignored = {
    # n_ctx is derived from other keys; the norms use PyTorch's default epsilon whatever layer_norm_epsilon is
    **_any_value(
        """resid_pdrop embd_pdrop attn_pdrop moe_pdrop initializer_range aux_loss_type aux_loss_weight sample_topk n_ctx
        layer_norm_epsilon"""
    ),
    "tie_word_embeddings": (False,),
}
