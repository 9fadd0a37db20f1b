"""From a recording to other kernels: lift to FX, rewrite, compile, record again."""
