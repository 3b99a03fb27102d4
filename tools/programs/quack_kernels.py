"""Quack's kernels against torch: quack_kernels.py rmsnorm|rmsnorm_backward|softmax|cross_entropy|topk|gemm|gemm_act."""

import sys

import torch

torch.manual_seed(0)
which = sys.argv[1]
x = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
w = torch.randn(256, device="cuda")
wide, plain = x.float().cpu(), torch.nn.functional
if which == "rmsnorm":
    from quack import rmsnorm

    found, wanted = rmsnorm(x, w), plain.rms_norm(wide, (256,), w.cpu(), 1e-6)
elif which == "rmsnorm_backward":
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    dout = torch.randn(4, 256, dtype=torch.bfloat16, device="cuda")
    rstd = rmsnorm_fwd(x, w, store_rstd=True)[2]
    found = rmsnorm_bwd(x, w, dout, rstd)[0]
    leaf = wide.clone().requires_grad_()
    plain.rms_norm(leaf, (256,), w.cpu(), 1e-6).backward(dout.float().cpu())
    assert leaf.grad is not None
    wanted = leaf.grad
elif which == "softmax":
    from quack import softmax

    found, wanted = softmax(x), plain.softmax(wide, 1)
elif which == "cross_entropy":
    from quack import cross_entropy

    target = torch.tensor([3, 0, 255, 17], device="cuda")
    found, wanted = (
        cross_entropy(x, target, reduction="none"),
        plain.cross_entropy(wide, target.cpu(), reduction="none"),
    )
elif which == "topk":
    from quack.topk import topk

    found, wanted = topk(x, 8)[0], wide.topk(8, 1).values
else:
    from quack.gemm_interface import gemm, gemm_act

    a = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(128, 128, dtype=torch.bfloat16, device="cuda").T
    product = a.float().cpu() @ b.float().cpu()
    if which == "gemm":
        found, wanted = gemm(a, b, tuned=False), product
    else:
        found, wanted = gemm_act(a, b, activation="relu", tuned=False)[1], product.relu()
torch.testing.assert_close(found.float().cpu(), wanted, atol=2e-2, rtol=2e-2)
print("right")
