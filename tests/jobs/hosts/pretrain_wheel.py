"""A training script of our own for the training loop inside the wheel of megatron-core (0.17 and newer).

It gives `megatron.training.pretrain` what every script gives it: a model, data and a forward step. Data are drawn from
a seeded generator per sample, so that they do not depend on the layout.
"""

import inspect
from functools import partial

import torch
from megatron.core import parallel_state
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
from megatron.training import arguments as training_arguments
from megatron.training import get_args, pretrain


class Tokens(torch.utils.data.Dataset):
    """Sample number n is the same on every rank and in every layout."""

    def __init__(self, samples: int, length: int, vocabulary: int) -> None:
        self._samples, self._length, self._vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        drawn = torch.Generator().manual_seed(1234 + int(index))
        tokens = torch.randint(self._vocabulary, (self._length + 1,), generator=drawn)
        return {"tokens": tokens[:-1], "labels": tokens[1:], "position_ids": torch.arange(self._length)}


def datasets(sizes, **_):
    """Training data only."""
    args = get_args()
    return Tokens(sizes[0], args.seq_length, args.vocab_size), None, None


datasets.is_distributed = True


def config_of(args):
    """The transformer's configuration; the function moved between releases."""
    try:
        from megatron.training.argument_utils import core_transformer_config_from_args
    except ImportError:
        core_transformer_config_from_args = training_arguments.core_transformer_config_from_args
    return core_transformer_config_from_args(args)


def model(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """A GPT from layers that need no TransformerEngine."""
    args = get_args()
    config = config or config_of(args)
    experts = {"num_experts": args.num_experts, "moe_grouped_gemm": False} if args.num_experts else {}
    layer = get_gpt_layer_local_spec(
        **experts, qk_layernorm=args.qk_layernorm, multi_latent_attention=args.multi_latent_attention
    )
    predicts = getattr(args, "mtp_num_layers", None)
    return GPTModel(
        config=config,
        transformer_layer_spec=layer,
        mtp_block_spec=get_gpt_mtp_block_spec(config, layer, False) if predicts and post_process else None,
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        parallel_output=True,
        share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        position_embedding_type=args.position_embedding_type,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def loss_of(losses):
    """Sum over the tokens and their number, as Megatron's own scripts return them."""
    total, count = losses.float().sum(), torch.tensor(losses.numel(), dtype=torch.int)
    return total, count, {"lm loss": torch.cat([total.clone().detach().view(1), count.view(1)])}


def of_this_rank(batch):
    """Of 2 * CP equal pieces of every sequence, those at the same distance from both ends."""
    size, rank = parallel_state.get_context_parallel_world_size(), parallel_state.get_context_parallel_rank()
    if size == 1:
        return batch
    pieces = {name: tensor.chunk(2 * size, dim=1) for name, tensor in batch.items()}
    return {name: torch.cat([cut[rank], cut[2 * size - 1 - rank]], dim=1) for name, cut in pieces.items()}


def forward_step(iterator, chunk):
    """One microbatch. Each tensor parallel rank reads the same samples, so that nothing has to be broadcast."""
    batch = of_this_rank(next(iterator)) if iterator is not None else None
    first, last = parallel_state.is_pipeline_first_stage(), parallel_state.is_pipeline_last_stage()
    tokens, positions = (batch["tokens"], batch["position_ids"]) if first else (None, None)
    return chunk(tokens, positions, None, labels=batch["labels"] if last else None), partial(loss_of)


def main() -> None:
    """Call `pretrain` as this release wants it."""
    given = {
        "train_valid_test_dataset_provider": datasets,
        "model_provider": model,
        "model_type": ModelType.encoder_or_decoder,
        "forward_step_func": forward_step,
    }
    if "cfg_container" not in inspect.signature(pretrain).parameters:
        pretrain(**given, args_defaults={})
        return
    from megatron.training import argument_utils

    args = training_arguments.parse_and_validate_args(args_defaults={})
    described = getattr(argument_utils, "gpt_config_from_args", None)  # since 0.19
    container = argument_utils.pretrain_cfg_container_from_args(args, *([described(args)] if described else []))
    pretrain(container, **given)


if __name__ == "__main__":
    main()
