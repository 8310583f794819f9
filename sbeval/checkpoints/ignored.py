"""Which keys of foreign configurations change nothing at evaluation: with any value (None), or with these alone.

What is read is on no list here. A key that is neither read nor listed is an error (`ConfigValues.refuse_unread`).
"""

from collections.abc import Sequence
from typing import Any

Ignored = dict[str, Sequence[Any] | None]


def _only(names: str, values: Sequence[Any] | None) -> Ignored:
    return dict.fromkeys(names.split(), values)


def _any_value(names: str) -> Ignored:
    return _only(names, None)


OF_TRANSFORMERS: Ignored = {
    # where a model comes from, what its tasks and outputs are called, how it is stored and computed
    **_any_value(
        """model_type architectures auto_map transformers_version torch_dtype dtype _name_or_path name_or_path
        _commit_hash _from_auto use_cache return_dict output_hidden_states output_attentions torchscript use_bfloat16
        tf_legacy_loss finetuning_task id2label label2id num_labels problem_type tokenizer_class prefix
        task_specific_params gradient_checkpointing chunk_size_feed_forward attn_implementation _attn_implementation
        _attn_implementation_autoset is_decoder sep_token_id decoder_start_token_id keys_to_ignore_at_inference"""
    ),
    # an evaluation says itself how long answers are and whether they are sampled
    **_any_value("max_length do_sample temperature top_k top_p typical_p output_scores return_dict_in_generate"),
    **_only("is_encoder_decoder add_cross_attention tie_encoder_decoder", (False, None)),
    **_only("cross_attention_hidden_size quantization_config", (None,)),
    "pruned_heads": ({}, None),
    # of generation, where older versions kept it: generation_config.json is the place that is read
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

# dropout and initial weights belong to training, and attention_head_type says what multi_query does
DOLOMITE_FLAT: Ignored = {
    **_any_value("resid_pdrop embd_pdrop attn_pdrop initializer_range init_method multi_query"),
    # rounding alone
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
"""Within the scaling of rotary embeddings, of which dolomite-engine reads two numbers."""
DOLOMITE_ROPE: Ignored = _any_value("rope_theta rope_scaling rope_parameters rope_dim")
"""Without rotary embeddings."""

FLA: Ignored = {
    # the width of the MLP is its tensors'; kernels and losses change rounding alone
    **_any_value(
        """hidden_ratio intermediate_size initializer_range fuse_norm fuse_swiglu fuse_cross_entropy
        fuse_linear_cross_entropy use_l2warp"""
    ),
    "elementwise_affine": (True,),
    "window_size": (None,),
}
FLA_FORGETTING: Ignored = {**FLA, "attnres_block_size": (None,)}
FOX: Ignored = {
    # the width of the MLP is its tensors', decays begin with what the next three say, and pruning is within rounding
    **_any_value(
        """hidden_ratio intermediate_size initializer_range fuse_norm fuse_cross_entropy log_pruning_tolerance
        decay_time_min decay_time_max fgate_bias_init"""
    ),
    "elementwise_affine": (True,),
    # without effect there, so another value means that another model was meant
    "attention_bias": (False,),
    "window_size": (None,),
}
_OF_FORGETTING = ("log_pruning_tolerance", "decay_time_min", "decay_time_max", "fgate_bias_init", "window_size")
FOX_SOFTMAX: Ignored = {key: values for key, values in FOX.items() if key not in _OF_FORGETTING}
FOX_SOFTMAX["qk_norm"] = (False,)  # until March 2025
MODULEFORMER: Ignored = {
    # n_ctx is computed; the norms are built with PyTorch's own epsilon whatever the key says
    **_any_value(
        """resid_pdrop embd_pdrop attn_pdrop moe_pdrop initializer_range aux_loss_type aux_loss_weight sample_topk n_ctx
        layer_norm_epsilon"""
    ),
    "tie_word_embeddings": (False,),
}
