"""Each form of checkpoint, packed by the test, is loaded to the bit."""

import json

import pytest
import torch
from torch import nn

from ipex_inductor.errors import ArgumentError, CheckpointError
from ipex_inductor.llm.checkpoints import load_low_precision_checkpoint, load_quantized
from ipex_inductor.quantization import WeightOnlyLinear, report_weights
from support.packed_weights import pack, pack_awq, pack_gptq

safetensors = pytest.importorskip("safetensors.torch", reason="safetensors writes the checkpoints")

pytestmark = pytest.mark.unit

WIDTH, HIDDEN, SIZE = 64, 96, 32
LAYERS = {"layers.0.up": (HIDDEN, WIDTH), "layers.0.down": (WIDTH, HIDDEN)}
LAYERS.update({name.replace("0", "1"): shape for name, shape in LAYERS.items()})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Tiny(nn.Module):
    """A language model with a tied head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.lm_head = nn.Linear(WIDTH, 40, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(x)


class Form:
    """A form of checkpoint: its JSON, and a function of a layer to tensors and exact values."""

    def __init__(self, config, make):
        self.config, self.make = config, make


def numbers(rows, columns, bits, groups, low=0):
    stored = torch.randint(0, 2**bits, (rows, columns))
    zeros = torch.randint(low, 2**bits, (rows, groups))
    scales = (torch.rand(rows, groups) + 0.5).half()
    return stored, zeros, scales


def expand(values, groups):
    return values[:, groups].float()


def gptq_form(bits=4, size=SIZE, act_order=False, plus_one=1, **config):
    def make(rows, columns):
        count = 1 if size == -1 else columns // size
        groups = torch.zeros(columns).long() if size == -1 else torch.arange(columns) // size
        if act_order:
            groups = groups[torch.randperm(columns)]
        stored, zeros, scales = numbers(rows, columns, bits, count, low=plus_one)
        qweight, qzeros = pack_gptq(stored, zeros - plus_one, bits)
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().contiguous()}
        if config.get("quant_method") != "rtn":
            tensors["g_idx"] = groups.int()
        return tensors, (stored - zeros[:, groups]).float() * expand(scales, groups)

    settings = {"bits": bits, "group_size": size, "desc_act": act_order, "sym": False}
    return Form({"quant_method": "gptq", **settings, **config}, make)


def awq_form(**config):
    def make(rows, columns):
        groups = torch.arange(columns) // SIZE
        stored, zeros, scales = numbers(rows, columns, 4, columns // SIZE)
        qweight, qzeros = pack_awq(stored, zeros)
        tensors = {"qweight": qweight, "qzeros": qzeros, "scales": scales.t().contiguous()}
        return tensors, (stored - zeros[:, groups]).float() * expand(scales, groups)

    return Form({"quant_method": "awq", "bits": 4, "group_size": SIZE, **config}, make)


def packed_form(bits=4, size=SIZE, symmetric=True, act_order=False):
    def make(rows, columns):
        count = 1 if size is None else -(-columns // size)
        groups = torch.zeros(columns).long() if size is None else torch.arange(columns) // size
        if act_order:
            groups = groups[torch.randperm(columns)]
        stored, zeros, scales = numbers(rows, columns, bits, count)
        zeros = torch.full_like(zeros, 2 ** (bits - 1)) if symmetric else zeros
        tensors = {
            "weight_packed": pack(stored, bits),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        if not symmetric:
            tensors["weight_zero_point"] = pack(zeros.t(), bits).t().contiguous()
        if act_order:
            tensors["weight_g_idx"] = groups.int()
        scales = scales.bfloat16()
        return tensors, (stored - zeros[:, groups]).float() * expand(scales, groups)

    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "strategy": "channel" if size is None else "group",
        "group_size": size,
        "actorder": "group" if act_order else None,
    }
    return Form(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
            "ignore": ["lm_head"],
        },
        make,
    )


def int8_form(config):
    def make(rows, columns):
        weight = torch.randint(-128, 128, (rows, columns), dtype=torch.int8)
        scales = torch.rand(rows, 1) + 0.5
        return {"weight": weight, "weight_scale": scales}, weight.float() * scales

    return Form(config, make)


def fp8_form():
    def make(rows, columns):
        weight = torch.randn(rows, columns).to(torch.float8_e4m3fn)
        scales = torch.rand(-(-rows // 48), columns // SIZE) + 0.5
        exact = weight.float() * scales.repeat_interleave(48, 0)[:rows].repeat_interleave(SIZE, 1)
        return {"weight": weight, "weight_scale_inv": scales}, exact

    return Form({"quant_method": "fp8", "weight_block_size": [48, SIZE]}, make)


ROUND = {"quant_method": "intel/auto-round", "sym": True}
INT = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
FORMS = {
    "gptq": gptq_form(),
    "gptq 8 bits": gptq_form(bits=8, size=-1),
    "gptq 8 bits, groups, act-order": gptq_form(bits=8, act_order=True),
    "gptq whole rows": gptq_form(size=-1),
    "gptq act-order": gptq_form(act_order=True),
    "gptq v2": gptq_form(plus_one=0, checkpoint_format="gptq_v2"),
    "rtn": gptq_form(quant_method="rtn"),
    "rtn 8 bits, whole rows": gptq_form(bits=8, size=-1, quant_method="rtn"),
    "auto-round": gptq_form(quant_method="intel/auto-round"),
    "auto-round as gptq": gptq_form(**ROUND, packing_format="auto_round:auto_gptq"),
    "auto-round as awq": awq_form(quant_method="auto-round", backend="auto_round:auto_awq"),
    "awq": awq_form(zero_point=True, version="gemm"),
    "int8": int8_form({"quant_method": "int8"}),
    "fp8": fp8_form(),
    "packed": packed_form(),
    "packed with zero points": packed_form(symmetric=False),
    "packed act-order": packed_form(act_order=True),
    "packed 8 bits, whole rows": packed_form(bits=8, size=None, symmetric=False),
    "compressed int8": int8_form(
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "config_groups": {"group_0": {"weights": INT}},
        }
    ),
}


def checkpoint(form):
    """Return the tensors of a checkpoint and the exact weights of its layers."""
    torch.manual_seed(3)
    source = Tiny()
    tensors, exact = {"embed.weight": source.embed.weight.detach()}, {}
    for name, shape in LAYERS.items():
        part, exact[name] = form.make(*shape)
        tensors.update({f"{name}.{key}": value for key, value in part.items()})
    for number in range(2):
        tensors[f"layers.{number}.up.bias"] = torch.randn(HIDDEN)
        tensors[f"layers.{number}.norm.weight"] = torch.randn(WIDTH)
        tensors[f"layers.{number}.norm.bias"] = torch.randn(WIDTH)
    return tensors, exact


def write(folder, tensors, config, name="config.json"):
    safetensors.save_file(tensors, folder / "model.safetensors")
    content = {"quantization_config": config} if name == "config.json" else config
    (folder / name).write_text(json.dumps(content))


def check(model, tensors, exact):
    for name, weight in exact.items():
        layer = model.get_submodule(name)
        assert isinstance(layer, WeightOnlyLinear)
        assert torch.equal(layer.dequantize(), weight), name
    state = model.state_dict()
    for name, tensor in tensors.items():
        if name in state and name.endswith(("bias", "norm.weight", "embed.weight")):
            assert torch.equal(state[name], tensor)
    assert model.lm_head.weight is model.embed.weight
    twin = Tiny()
    with torch.no_grad():
        for name, weight in exact.items():
            twin.get_submodule(name).weight.copy_(weight)
        twin.load_state_dict(
            {
                k: v
                for k, v in tensors.items()
                if k in state and "." in k and k.rpartition(".")[0] not in exact
            },
            strict=False,
        )
        for number in range(2):
            twin.layers[number].up.bias.copy_(tensors[f"layers.{number}.up.bias"])
        tokens = torch.randint(0, 40, (2, 5))
        expected = twin.double()(tokens)
        # fp32 sums of up to 96 products, relative to the largest of the outputs
        bound = 1e-5 * float(expected.abs().max())
        torch.testing.assert_close(model(tokens).double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_weights_are_loaded_to_the_bit(name, device, tmp_path):
    form = FORMS[name]
    tensors, exact = checkpoint(form)
    write(tmp_path, tensors, form.config)
    with torch.device(device):
        model = Tiny().eval()
    assert load_quantized(model, tmp_path) is model
    check(model, tensors, exact)
    quantized = [layer.name for layer in report_weights(model).quantized]
    assert sorted(quantized) == sorted(LAYERS)
    assert not any(t.is_meta for t in model.state_dict().values())


@pytest.mark.parametrize("name", FORMS)
def test_the_pair_of_load_low_precision_checkpoint_is_taken(name, tmp_path):
    form = FORMS[name]
    tensors, exact = checkpoint(form)
    write(tmp_path, tensors, form.config)
    state, config = load_low_precision_checkpoint(tmp_path)
    assert state.keys() == tensors.keys()
    assert all(
        torch.equal(state[key], value)
        for key, value in tensors.items()
        if value.dtype != torch.float8_e4m3fn
    )
    assert config["quant_method"] == form.config["quant_method"]
    assert {"bits", "group_size", "desc_act"} <= config.keys()
    model = load_quantized(Tiny().eval(), (state, config))
    check(model, tensors, exact)


@pytest.mark.parametrize(
    ("name", "form"), [("quant_config.json", "awq"), ("quantize_config.json", "gptq act-order")]
)
def test_settings_are_found_in_files_of_their_own(name, form, tmp_path):
    tensors, exact = checkpoint(FORMS[form])
    config = {k: v for k, v in FORMS[form].config.items() if k != "quant_method"}
    if form == "awq":
        config = {"w_bit": 4, "q_group_size": SIZE, "zero_point": True, "version": "GEMM"}
    write(tmp_path, tensors, config, name)
    (tmp_path / "config.json").write_text("{}")
    check(load_quantized(Tiny().eval(), tmp_path), tensors, exact)


def test_files_of_an_index_and_of_torch_save_are_read(tmp_path):
    form = FORMS["gptq"]
    tensors, exact = checkpoint(form)
    write(tmp_path, tensors, form.config)
    (tmp_path / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "model.bin")
    check(load_quantized(Tiny().eval(), tmp_path), tensors, exact)
    names = [*tensors]
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    weight_map = {}
    for file, keys in parts.items():
        safetensors.save_file({key: tensors[key] for key in keys}, tmp_path / file)
        weight_map.update(dict.fromkeys(keys, file))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    check(load_quantized(Tiny().eval(), tmp_path), tensors, exact)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"without b\.safetensors"):
        load_quantized(Tiny(), tmp_path)


def test_a_bare_state_dict_is_that_of_gptq():
    tensors, exact = checkpoint(FORMS["gptq act-order"])
    check(load_quantized(Tiny().eval(), tensors), tensors, exact)


def test_layers_may_have_bits_and_groups_of_their_own(tmp_path):
    """GPTQModel's `dynamic` and auto-round's `extra_config`: shapes tell what a layer has."""
    four, eight = gptq_form(dynamic={"+:.*down": {"bits": 8}}), gptq_form(bits=8, size=16)
    tensors, exact = checkpoint(four)
    for name, shape in LAYERS.items():
        if name.endswith("down"):
            part, exact[name] = eight.make(*shape)
            tensors.update({f"{name}.{key}": value for key, value in part.items()})
    write(tmp_path, tensors, four.config)
    check(load_quantized(Tiny().eval(), tmp_path), tensors, exact)


def test_weights_take_the_dtype_of_the_model(tmp_path):
    form = FORMS["gptq"]
    tensors, exact = checkpoint(form)
    write(tmp_path, tensors, form.config)
    model = load_quantized(Tiny().bfloat16().eval(), tmp_path, lowp_mode=2)
    layer = model.layers[0].up
    assert (layer.bias.dtype, model.layers[0].norm.weight.dtype) == (torch.bfloat16,) * 2
    assert layer.scales.dtype is torch.float16
    assert layer.compute == "bfloat16"
    assert torch.equal(layer.dequantize(), exact["layers.0.up"])


def test_ranks_that_do_not_exist_are_refused(tmp_path):
    with pytest.raises(ArgumentError, match="rank"):
        load_low_precision_checkpoint(tmp_path, 2, 2)
