import argparse
import json
import types

from msprobe_megatron.topology.host import framework


def test_secrets_are_masked_and_names_that_only_look_alike_are_not():
    arguments = argparse.Namespace(
        wandb_api_key="abc",
        hf_token="xyz",
        db_password="pw",
        aws_secret="s",
        tokenizer_type="NullTokenizer",
        moe_token_dispatcher_type="alltoall",
        kv_channels=16,
        key_file_count=3,
        nested={"api-key": "abc", "lr": 0.1},
        from_yaml=types.SimpleNamespace(wandb=types.SimpleNamespace(api_key="abc"), lr=0.1),
    )
    plain = framework.plain(arguments)
    text = json.dumps(plain)
    assert not any(secret in text for secret in ("abc", "xyz", '"pw"', '"s"'))
    assert plain["tokenizer_type"] == "NullTokenizer"
    assert plain["moe_token_dispatcher_type"] == "alltoall"
    assert plain["kv_channels"] == 16
    assert plain["nested"] == {"api-key": "***", "lr": 0.1}
    assert plain["from_yaml"] == {"wandb": {"api_key": "***"}, "lr": 0.1}


def test_objects_become_text_and_the_rest_stays_json():
    class Thing:
        def __repr__(self):
            return "x" * 1000

    plain = framework.plain(argparse.Namespace(thing=Thing(), dtype=complex, numbers=(1, 2), nothing=None))
    assert len(plain["thing"]) <= 200
    assert plain["numbers"] == [1, 2]
    assert plain["nothing"] is None
    json.dumps(plain)


def test_without_megatron_training_there_is_no_iteration():
    assert framework.megatron_iteration() is None
    assert framework.resumed_iteration() == 0
