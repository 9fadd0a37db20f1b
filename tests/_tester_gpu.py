"""All cases of tests/models.py on CUDA."""

import copy, sys, traceback, torch

sys.path[:0] = [".", "tests"]
from torch import nn
from models import CASES, make
from nimble_core.nimble import Nimble
from nimble_core.options import Options
from nimble_core.record import other_values
from nimble_core.structure import builder, flatten


def move(v):
    return [t.cuda() for t in v]


torch.set_default_device("cuda")
for name in ("constants","constant_written","indexing","linear_algebra","deep"):
    try:
        model, args, kw = make(name)
        t, s = flatten((args, kw))
        for pol in ("single", "nimble"):
            model, args, kw = make(name)
            eager = copy.deepcopy(model) if isinstance(model, nn.Module) else model
            net = Nimble(model, Options(tune="off", policy=pol)).prepare(*args, **kw)
            sig = net.engines[0].signature
            for seed in (3, 4, 3):
                a, k = builder(sig.structure)(other_values(sig.tensors, seed))
                b, l = builder(sig.structure)(other_values(sig.tensors, seed))
                with torch.no_grad():
                    ref = flatten(eager(*b, **l))[0]
                out = flatten(net(*a, **k))[0]
                if name in ("dropout", "random_numbers"):
                    continue
                torch.testing.assert_close(out, ref, rtol=1e-4, atol=1e-4, equal_nan=True)
                torch.testing.assert_close(flatten((a, k))[0], flatten((b, l))[0])
            if isinstance(model, nn.Module):
                torch.testing.assert_close(
                    list(model.state_dict().values()), list(eager.state_dict().values()), rtol=1e-4, atol=1e-4
                )
            net.close()
        print("ok", name, net and "", sep=" ")
    except BaseException as e:
        print("FAIL", name, type(e).__name__, str(e)[:300].replace("\n", " | "))
        if isinstance(e, torch.AcceleratorError):
            break
