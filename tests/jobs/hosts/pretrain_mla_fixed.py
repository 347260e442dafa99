"""`pretrain_wheel`, with the fault of MLA under tensor parallelism repaired: see docs/found.md."""

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import multi_latent_attention as mla
from megatron.training import get_args

from tests.jobs.hosts import pretrain_wheel

gather = mla.gather_from_tensor_model_parallel_region


def gathered(tensor, *args, **kwargs):
    """The positional part of the keys is used by the heads of this rank alone: its gradient has to be summed."""
    whole, sizes = gather(tensor, *args, **kwargs), (get_args().kv_lora_rank, get_args().qk_pos_emb_head_dim)
    if whole.size(-1) != sum(sizes):
        return whole
    latent, positional = torch.split(whole, sizes, dim=-1)
    return torch.cat([latent, tensor_parallel.copy_to_tensor_model_parallel_region(positional)], dim=-1)


mla.gather_from_tensor_model_parallel_region = gathered

if __name__ == "__main__":
    pretrain_wheel.main()
