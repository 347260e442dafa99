"""``python -m msprobe_megatron.demo.pretrain_gpt``: the training script of the demo."""

from msprobe_megatron.lab.demo.pretrain_gpt import main, run

__all__ = ["main", "run"]

if __name__ == "__main__":
    main()
