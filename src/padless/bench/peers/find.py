"""Peers by name, and the folder that they lie in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from padless.bench.peers import Peer
from padless.bench.peers.deepgemm import DeepGemm
from padless.bench.peers.monomoe import MonoMoe
from padless.bench.peers.mslk import Mslk
from padless.bench.peers.tma_adaptive import TmaAdaptive
from padless.bench.peers.torch_ops import TorchOps
from padless.bench.peers.torchao import TorchAo
from padless.bench.peers.triton_moe import TritonMoe

DEFAULT_FOLDER = Path(".peers")


def find_peers(folder: str | Path | None = None, names: Sequence[str] | None = None) -> list[Peer]:
    """Every peer that takes part by default, or those named.

    folder: as `padless.bench.peers` describes; None is ./.peers if it exists.
    """
    known = every_peer(resolve_folder(folder))
    if names is None:
        return [peer for peer in known if peer.by_default]
    unknown = set(names) - {peer.name for peer in known}
    if unknown:
        raise ValueError(f"peers must be among {[peer.name for peer in known]}, got {sorted(unknown)}")
    return [peer for peer in known if peer.name in names]


def every_peer(folder: Path | None) -> list[Peer]:
    """All peers, those that take part when they are named alone too."""
    in_folders = (DeepGemm, TmaAdaptive, Mslk, TorchAo, MonoMoe)
    return [*(peer(folder) for peer in in_folders), TorchOps(), TritonMoe()]


def resolve_peers(peers: Sequence[Peer] | Sequence[str] | None, peers_dir: str | Path | None) -> list[Peer]:
    """Peers by name (all of them for None) or as they are given."""
    names = None if peers is None else [peer for peer in peers if isinstance(peer, str)]
    given = [] if peers is None else [peer for peer in peers if not isinstance(peer, str)]
    found = find_peers(peers_dir, names) if names is None or names else []
    return found + given


def resolve_folder(folder: str | Path | None) -> Path | None:
    """The folder of peers as an absolute path, or None where there is none."""
    if folder is None:
        return DEFAULT_FOLDER.resolve() if DEFAULT_FOLDER.is_dir() else None
    path = Path(folder)
    if not path.is_dir():
        raise ValueError(f"peers folder must be an existing folder, got {str(folder)!r}")
    return path.resolve()
