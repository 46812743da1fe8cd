from dataclasses import replace
from pathlib import Path

import pytest

from pensieve.builder.checkpoints.config import DecoderConfig, LinearAttention, Rotary, Shard
from pensieve.runtime.device.memory import (
    CUDA_ALLOWANCE,
    GIB,
    activation_bytes,
    check_pool_fits,
    divide,
    host_memory,
    host_room,
)
from pensieve.runtime.device.protocol import Memory
from pensieve.scheduler.types import SettingError

LLAMA_8B = DecoderConfig(
    architecture="LlamaForCausalLM",
    vocab_size=128256,
    hidden_size=4096,
    layers=32,
    heads=32,
    kv_heads=8,
    head_dim=128,
    mlp_size=14336,
    max_positions=8192,
    embedding_size=4096,
    rotary=Rotary(128, 5e5),
    position_offset=0,
    norm="rms",
    norm_eps=1e-5,
    norm_affine=True,
    norm_first=True,
    final_norm=True,
    qk_norm=False,
    activation="silu",
    gated=True,
    qkv_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    tied_embeddings=False,
)


def test_activations_of_a_step():
    """Counted by hand for 1,024 tokens, 64 rows and 16k contexts in bfloat16."""
    stream = 4096 * (3 * 2 + 2 * 4)
    mlp = 4 * 14336 * 2
    partial = 16 * 32 * 129 * 4
    drawn, scored = 128256 * (2 + 4 + 4 + 76), 128256 * (2 + 4 + 4 + 8)
    rows = dict(sampled=64, scored=10)
    logits = 64 * drawn + 10 * scored
    whole = activation_bytes(Shard(LLAMA_8B), 2, tokens=1024, context=16384, **rows)
    assert whole == 1024 * (stream + mlp + partial) + logits
    short = activation_bytes(Shard(LLAMA_8B), 2, tokens=1024, context=1024, **rows)
    assert short == 1024 * (stream + mlp) + logits, "contexts of one split need no partial results"
    narrow = activation_bytes(
        Shard(replace(LLAMA_8B, mlp_size=64)), 2, tokens=1, sampled=0, scored=0, context=1024
    )
    assert narrow == stream + (3 * 32 + 2 * 8) * 128 * 2, "attention is the wider part"


def test_activations_of_experts():
    """The MLP's part is as large as the experts of a token: input and results of 4,096, projections
    of 1,024."""
    sparse = replace(LLAMA_8B, mlp_size=1024, experts=16, experts_per_token=4)
    whole = activation_bytes(Shard(sparse), 2, tokens=10, sampled=0, scored=0, context=1024)
    assert whole == 10 * (4096 * (3 * 2 + 2 * 4) + 4 * ((3 * 4096 + 3 * 1024) * 2 + 4096 * 4))
    biased = replace(sparse, mlp_bias=True, norm_results=True)
    more = activation_bytes(Shard(biased), 2, tokens=10, sampled=0, scored=0, context=1024) - whole
    assert more == 10 * (4096 * 2 + 4 * 4096 * 2), "a normed result, and the biases of results"


def test_activations_of_linear_attention():
    """Counted by hand: two key heads and four value heads of 16, and a narrow MLP."""
    linear = LinearAttention(2, 4, 16, 16, 4)
    values = 64
    channels = 2 * 2 * 16 + values
    narrow = 2 * channels + 3 * values + 2 * 4 * 64
    expected = 4096 * (3 * 2 + 2 * 4) + narrow * 2 + (3 * values + 12 * 4) * 4
    config = replace(LLAMA_8B, heads=1, kv_heads=1, head_dim=8, mlp_size=8, linear=linear)
    sizes = dict(tokens=10, sampled=0, scored=0, context=1024)
    assert activation_bytes(Shard(config), 2, **sizes) == 10 * expected


def test_activations_of_a_rank():
    """Heads and MLP are divided, the vocabulary is not; four of the eight ranks share each KV head
    with a neighbour."""
    sizes = dict(tokens=1, context=1024)
    rank = Shard(replace(LLAMA_8B, kv_heads=4), 8)
    stream = 4096 * (4 * 2 + 2 * 4)
    assert activation_bytes(rank, 2, **sizes, sampled=0, scored=0) == stream + 4 * 14336 // 8 * 2
    narrow = Shard(replace(rank.config, mlp_size=64), 8)
    assert (
        activation_bytes(narrow, 2, **sizes, sampled=0, scored=0)
        == stream + (3 * 4 + 2 * 1) * 128 * 2
    )
    logits = [activation_bytes(rank, 2, **sizes, sampled=1, scored=n) for n in (0, 1)]
    assert logits[1] - logits[0] == 128256 * (3 * 2 + 4 + 4 + 8)


def test_a_gpu_is_divided():
    memory = Memory(free=120 * GIB, total=140 * GIB)
    division = divide(memory, 0.9, 16 * GIB, 3 * GIB)
    assert division.kv == 126 * GIB - 16 * GIB - 3 * GIB - CUDA_ALLOWANCE
    assert sum(division) == 126 * GIB


@pytest.mark.parametrize(
    ("free", "share", "weights", "message"),
    [
        (60, 1.1, 16, "must be more than 0 and at most 1, not 1.1"),
        (60, 0.0, 16, "must be more than 0"),
        (
            60,
            0.2,
            16,
            "0.2 of 80.0 GiB leaves nothing for KV: weights take 16.0 GiB, .* "
            "--max-num-batched-tokens",
        ),
        (
            40,
            0.9,
            16,
            "means 51.0 GiB of KV and 3.0 of activations, but 40.0 GiB are free: lower it",
        ),
    ],
)
def test_a_share_that_cannot_be_had(free, share, weights, message):
    with pytest.raises(SettingError, match=f"--gpu-memory-utilization: .*{message}"):
        divide(Memory(free * GIB, 80 * GIB), share, weights * GIB, 3 * GIB)


def test_a_pool_that_does_not_fit_says_what_does():
    check_pool_fits("--host-kv-chunks", 10, 10 * GIB, 10 * GIB)
    with pytest.raises(
        SettingError, match=r"--host-kv-chunks: 10 chunks need 10\.00 GiB and 5\.50 .* enough for 5"
    ):
        check_pool_fits("--host-kv-chunks", 10, 10 * GIB, 5 * GIB + GIB // 2)


class Machine:
    """The files of a system with 100 GiB of memory, of which 80 are available."""

    def __init__(self, root, groups="0::/\n"):
        self.root = root
        self.write("proc/meminfo", MemTotal=100, MemAvailable=80, CommitLimit=60, Committed_AS=15)
        self.write("proc/sys/vm/overcommit_memory", "0\n")
        self.write("proc/self/status", "Name:\tpython\nMems_allowed_list:\t0-1\n")
        self.write("proc/self/cgroup", groups)

    def write(self, path, text="", **gib):
        file = self.root / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(
            text or "".join(f"{name}: {size * 2**20} kB\n" for name, size in gib.items())
        )

    def node(self, number, **gib):
        lines = (f"Node {number} {name}:  {size * 2**20} kB\n" for name, size in gib.items())
        self.write(f"sys/devices/system/node/node{number}/meminfo", "".join(lines))

    def group(self, name, *, used, cached=0, **limits):
        """Of version 2; sizes in GiB."""
        for file, limit in (("max", "max"), ("high", "max"), *limits.items()):
            size = limit if limit == "max" else limit * GIB
            self.write(f"sys/fs/cgroup/{name}/memory.{file}", f"{size}\n")
        self.write(f"sys/fs/cgroup/{name}/memory.current", f"{used * GIB}\n")
        stat = f"anon 5\nactive_file {cached * GIB}\ninactive_file 0\n"
        self.write(f"sys/fs/cgroup/{name}/memory.stat", stat)

    def group_v1(self, name, *, used, limit, cached=0):
        for file, text in (
            ("limit_in_bytes", f"{limit}\n"),
            ("usage_in_bytes", f"{used * GIB}\n"),
            ("stat", f"total_inactive_file {cached * GIB}\ntotal_active_file 0\n"),
        ):
            self.write(f"sys/fs/cgroup/memory/{name}/memory.{file}", text)

    def gib(self):
        memory = host_memory(self.root)
        return memory.free / GIB, memory.total / GIB


def test_the_hosts_memory_is_that_of_the_machine(tmp_path):
    machine = Machine(tmp_path)
    assert machine.gib() == (80, 100)
    assert host_memory().total > 0, "and this machine has its own files"


def test_every_control_group_around_the_process_limits_it(tmp_path):
    machine = Machine(tmp_path, "0::/pod/server\n")
    machine.group("pod/server", used=10)
    assert machine.gib() == (80, 100)
    machine.group("pod/server", used=10, cached=4, max=60)
    assert machine.gib() == (54, 60), "the page cache is given up"
    machine.group("pod/server", used=10, cached=4, max=60, high=30)
    assert machine.gib() == (24, 30), "beyond `high` the process is slowed down"
    machine.group("pod", used=25, max=28)
    assert machine.gib() == (3, 28)
    machine.group("pod", used=29, max=28)
    assert machine.gib() == (0, 28)


def test_a_container_sees_its_own_group_as_the_outermost_one(tmp_path):
    machine = Machine(tmp_path, "0::/somewhere/outside\n")
    machine.group("", used=10, max=40)
    assert machine.gib() == (30, 40)


def test_control_groups_of_version_1(tmp_path):
    machine = Machine(tmp_path, "5:cpu,cpuacct:/other\n4:memory:/pod/server\n0::/\n")
    machine.group_v1("", used=70, limit=2**63 - 4096)
    machine.group_v1("pod", used=20, limit=50 * GIB)
    machine.group_v1("pod/server", used=12, limit=40 * GIB, cached=6)
    assert machine.gib() == (30, 40)


def test_a_process_may_be_confined_to_some_numa_nodes(tmp_path):
    machine = Machine(tmp_path)
    parts = {"Active(file)": 3, "Inactive(file)": 2, "SReclaimable": 1}
    machine.node(0, MemTotal=50, MemFree=30, **parts)
    machine.node(1, MemTotal=50, MemFree=40, **parts)
    assert machine.gib() == (80, 100)
    machine.write("proc/self/status", "Mems_allowed_list:\t1,3-4\n")
    assert machine.gib() == (46, 50)


def test_strict_overcommit_leaves_what_is_not_promised_yet(tmp_path):
    machine = Machine(tmp_path)
    machine.write("proc/sys/vm/overcommit_memory", "2\n")
    assert machine.gib() == (45, 100)


def test_files_that_a_sandbox_leaves_out_limit_nothing(tmp_path):
    """gVisor's groups are of version 1, have a limit always, and no statistics."""
    machine = Machine(tmp_path, "4:memory:/\n")
    machine.group_v1("", used=12, limit=2**63 - 1)
    (tmp_path / "sys/fs/cgroup/memory/memory.stat").unlink()
    assert machine.gib() == (80, 100)
    machine.group_v1("", used=12, limit=40 * GIB)
    (tmp_path / "sys/fs/cgroup/memory/memory.stat").unlink()
    assert machine.gib() == (28, 40)
    (tmp_path / "sys/fs/cgroup/memory/memory.usage_in_bytes").unlink()
    assert machine.gib() == (40, 40)
    machine.node(0, MemTotal=50, MemFree=30)
    assert machine.gib() == (30, 40), "a node without the other fields"
    for path in ("proc/self/cgroup", "proc/self/status", "proc/sys/vm/overcommit_memory"):
        (tmp_path / path).unlink()
        machine.gib()
    assert machine.gib() == (80, 100)
    machine.write("proc/sys/vm/overcommit_memory", "2\n")
    machine.write("proc/meminfo", MemTotal=100, MemAvailable=80)
    assert machine.gib() == (80, 100)


def test_files_that_may_not_be_read_limit_nothing(tmp_path, monkeypatch):
    machine = Machine(tmp_path, "0::/server\n")
    machine.group("server", used=10, max=40)
    machine.node(0, MemTotal=50, MemFree=30)
    read_text = Path.read_text

    def read(path, *args, **named):
        if path.name != "meminfo" or "node0" in path.parts:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.gib() == (80, 100)


def test_the_host_pool_leaves_a_share_of_the_memory_free():
    assert host_room(Memory(80 * GIB, 100 * GIB)) == pytest.approx(50 * GIB)
    assert host_room(Memory(20 * GIB, 100 * GIB)) < 0, "another server has taken its share"
