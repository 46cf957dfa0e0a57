"""Who computes: "interpret" gives plain JAX's bytes, "pallas" refuses where it cannot run, and None looks at the target."""

import jax
import jax.numpy as jnp
import pytest
from interpreting import interpreted, numbers_like, same_bytes, same_either_way
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from coat_jax.quant import E4M3, E5M2, PerBlock, PerGroup, PowerExpansion, QuantSpec, dequantize, quantize
from pallas_kernels.dispatch import by_target
from pallas_kernels.group_map import group_map

EXPANDED = QuantSpec(E4M3, PerGroup(128, axis=-2), PowerExpansion(), "stochastic", keep_nonzero=True)


@interpreted
@pytest.mark.parametrize(
    "spec, shape", [(QuantSpec(E4M3, PerGroup(16), scale_dtype=jnp.bfloat16), (3, 5, 70)), (EXPANDED, (2, 256, 40))], ids=str
)
def test_interpreted_bytes_are_those_of_plain_jax(spec, shape):
    same_either_way(numbers_like(shape).astype(jnp.bfloat16), spec)


@interpreted
@pytest.mark.parametrize("shape, dtype", [((2, 200, 300), jnp.bfloat16), ((256, 128), jnp.float32), ((5, 64), jnp.bfloat16)])
@pytest.mark.parametrize("scale", [jnp.float32, jnp.bfloat16])
def test_interpreted_blocks_are_those_of_plain_jax(shape, dtype, scale):
    """Ragged blocks, a block of zeros, and a NaN that stays in its block."""
    x = numbers_like(shape).astype(dtype).at[..., :128, :128].set(0.0).at[..., -1, -1].set(jnp.nan)
    spec = QuantSpec(E4M3, PerBlock((128, 128)), scale_dtype=scale)
    q, r = (jax.jit(lambda x, i=i: quantize(x, spec, implementation=i))(x) for i in ("xla", "interpret"))
    same_bytes(q, r)


@interpreted
def test_all_bfloat16_numbers():
    x = jax.lax.bitcast_convert_type(jnp.arange(2**16, dtype=jnp.uint16), jnp.bfloat16).reshape(-1, 32)
    spec = QuantSpec(E5M2, PerGroup(32))
    same_bytes(*(jax.jit(lambda x, i=i: quantize(x, spec, implementation=i))(x) for i in ("xla", "interpret")))


@interpreted
def test_kernels_count_in_32_bits_where_programs_have_64():
    x, spec = numbers_like((3, 128)).astype(jnp.bfloat16), QuantSpec(E4M3, PerGroup(32))
    with jax.enable_x64(True):
        same_bytes(*(quantize(x, spec, implementation=i) for i in ("xla", "interpret")))


def test_64_bit_numbers_are_refused():
    with jax.enable_x64(True):
        x, spec = jnp.ones((8, 128), jnp.float64), QuantSpec(E4M3, PerGroup(128))
        for implementation in ("interpret", "pallas"):
            with pytest.raises(ValueError, match="has no kernel for float64; use None or 'xla'"):
                quantize(x, spec, implementation=implementation)


def test_pallas_says_where_it_runs():
    x = jnp.ones((8, 128))
    with pytest.raises(ValueError, match="runs in programs for one Hopper GPU"):
        quantize(x, QuantSpec(E4M3, PerGroup(128)), implementation="pallas")
    with pytest.raises(ValueError, match="groups along the last axis or the one before only; use None or 'xla'"):
        dequantize(quantize(x, QuantSpec(E4M3, PerBlock((8, 128)))), implementation="pallas")
    with pytest.raises(ValueError, match="blocks of 16, 32, 64, 128, 256 columns, not of 24"):
        quantize(x, QuantSpec(E4M3, PerBlock((8, 24))), implementation="pallas")
    with pytest.raises(ValueError, match="not of 6"):
        quantize(x, QuantSpec(E4M3, PerGroup(6)), implementation="interpret")


def has_kernel(devices, spec=None, wrap=lambda f: f):
    double = lambda x: (2 * x,)  # noqa: E731
    f = wrap(lambda x: by_target(lambda x: group_map(double, [(x,)], name="double")[0], double, x)[0])
    where = SingleDeviceSharding(devices[0]) if spec is None else NamedSharding(jax.sharding.Mesh(devices, ("fsdp",)), spec)
    x = jax.ShapeDtypeStruct((512, 128), jnp.bfloat16, sharding=where)
    text = jax.jit(f).lower(x).compile().as_text()
    assert "all-gather" not in text
    return "mosaic_gpu" in text


@pytest.mark.plan
def test_none_takes_the_kernel_where_the_target_is_a_hopper_gpu():
    from jax.experimental import topologies

    from coat_jax.compiled import devices

    target = devices.named("h100").target(None)

    def described(text, count=1):
        name = f"1x1x{count}"
        return topologies.get_topology_desc(platform="cuda", topology_name="gpu", target_config=text, topology=name).devices

    assert has_kernel(described(target))
    with jax.enable_x64(True):
        assert has_kernel(described(target))
    assert not has_kernel(described(target.replace("major: 9", "major: 8")))
    assert not has_kernel(described(target.replace("major: 9", "major: 10")))
    assert not has_kernel(jax.devices("cpu"))
    two = described(target, 2)
    assert not has_kernel(two, PartitionSpec("fsdp"))
    mesh = jax.sharding.Mesh(two, ("fsdp",))
    specs = {"mesh": mesh, "in_specs": PartitionSpec("fsdp"), "out_specs": PartitionSpec("fsdp"), "check_vma": False}
    assert has_kernel(two, PartitionSpec("fsdp"), lambda f: jax.shard_map(f, **specs))
