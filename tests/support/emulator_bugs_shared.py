"""The planted bugs of what CTAs, clusters and launches share: tile queue, memory order, a CTA's own scales, a start."""

from __future__ import annotations

from support.emulator_bugs import CLUSTER, CLUSTER_SYNC, LOAD, MAIN, MBARRIER, MULTIPLY, QUEUE, ROW_MAJOR, TWO_M64S, Bug

BUGS: tuple[Bug, ...] = (
    # ---- the queue of tiles
    Bug("next tile never asked for", "deadlock",
        (LOAD, "if (TAKES_LATE && kb == ask_at) mbarrier_arrive(shared_address(&shared.next_tile_wanted));", ""),
        config=TWO_M64S, sizes=(300, 3)),
    Bug("next tile asked for in every K block", "deadlock mbarrier",
        (LOAD, "kb == ask_at", "kb >= ask_at"), config=TWO_M64S, sizes=(300, 3)),
    Bug("another tile awaited after the last", "deadlock",
        (QUEUE, "ASKED && tile.rows != 0", "ASKED"), config=TWO_M64S, sizes=(300, 3)),
    Bug("barrier of the next tile not made", "mbarrier",
        (MAIN, "if (TAKES_LATE) mbarrier_init(shared_address(&shared.next_tile_wanted), 1);", ""), config=TWO_M64S,
        sizes=(300, 3)),
    Bug("queue slot not waited for", "race uninitialised-shared", (QUEUE, "mbarrier_wait(full, pipeline.phase);", ";")),
    Bug("queue slot reused early", "race mbarrier", (QUEUE, "mbarrier_wait(empty, pipeline.phase ^ 1);", ";")),
    Bug("first tile announced before its lane has written it", "race uninitialised-shared",
        (QUEUE, "__syncwarp();\n    if (lane == 0) mbarrier_arrive", "if (lane == 0) mbarrier_arrive")),
    Bug("start of the other warps before the barriers are there", "mbarrier race",
        (MAIN, "bar_sync(START_BARRIER, NUM_THREADS);", "bar_sync(START_BARRIER, NUM_THREADS - 32);")),
    Bug("first tile queued twice", "race mbarrier deadlock", (MAIN, ", has_first_tile)", ")")),
    # ---- clusters
    Bug("no cluster barrier after the set-up", "mbarrier", (MAIN, CLUSTER_SYNC, ""), CLUSTER, n=512),
    Bug("no cluster barrier before the end", "exit", (MAIN, CLUSTER_SYNC, ""), CLUSTER, n=512, nth=1),
    Bug("multicast to itself only", "deadlock",
        (LOAD, "(1 << CLUSTER_N) - 1", "1 << cluster_cta_rank()"), CLUSTER, n=512),
    Bug("stage released in the own CTA only", "deadlock",
        (MULTIPLY, "if (lane < CLUSTER_N) mbarrier_arrive_cluster(empty, lane);",
        "if (lane == cluster_cta_rank()) mbarrier_arrive_cluster(empty, lane);"), CLUSTER, n=512),
    Bug("empty barrier counts one CTA of the cluster", "mbarrier race",
        (MAIN, "CLUSTER_N * NUM_CONSUMER_WARPS);", "NUM_CONSUMER_WARPS);"), CLUSTER, n=512),
    # ---- memory order
    Bug("arrivals release nothing", "race",
        (MBARRIER, "mbarrier.arrive.release.cta.shared::cta.b64", "mbarrier.arrive.relaxed.cta.shared::cta.b64")),
    Bug("waits acquire nothing", "race", (MBARRIER, "try_wait.parity.acquire.cta", "try_wait.parity.relaxed.cta")),
    Bug("tiles are queued for the other CTA at CTA scope", "race",
        (QUEUE, "mbarrier_arrive_release_cluster(", "mbarrier_arrive_cluster("), CLUSTER, n=512),
    Bug("tiles of the other CTA are waited for at CTA scope", "race",
        (MBARRIER, "try_wait.parity.acquire.cluster", "try_wait.parity.acquire.cta"), CLUSTER, n=512),
    Bug("the counter is set back with no fence after the last draw", "race",
        (QUEUE, "__threadfence();", ""), workers=2),
    # ---- row-major scales
    Bug("scale window overwritten early", "race mbarrier",
        (LOAD, "mbarrier_wait(shared_address(&shared.window_empty), window_phase ^ 1);", ""), ROW_MAJOR),
    Bug("scale window not waited for", "race",
        (MAIN, "if constexpr (SCALES_K_MAJOR) mbarrier_wait(shared_address(&shared.window_full), window_phase);", ""),
        ROW_MAJOR),
    Bug("scale window never released", "deadlock",
        (MAIN, "if (lane == 0) mbarrier_arrive(shared_address(&shared.window_empty));", ""), ROW_MAJOR),
    # ---- the beginning
    Bug("offs are read though the kernels ahead may still be writing them", "grid-dependency",
        (MAIN, "if (!is_ready) griddepcontrol_wait();\n        if (load_lane", "if (load_lane")),
    Bug("the ring begins at a stage that was filled ahead", "race mbarrier deadlock",
        (LOAD, "if constexpr (LOADS_AHEAD) pipeline = {ahead == STAGES ? 0 : ahead, ahead == STAGES};", "")),
    Bug("after a full ring is loaded ahead, the producer does not wait for the first stage", "race mbarrier",
        (LOAD, "ahead == STAGES};", "false};"), k=1664),  # more K blocks than stages
)  # fmt: skip
