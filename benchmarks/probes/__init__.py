"""Measurements that decide how kernels are written, on a GPU and without any plugin."""

SHAPES = [
    (8192, 4096, 16384),
    (8192, 4096, 4096),
    (8192, 2048, 8192),
    (50432, 1024, 4096),
    (16384, 768, 3072),
]
CONFIGS = [  # BM, BN, BK, group, subtiles, warps, stages, warp specialization
    (128, 256, 64, 8, 1, 8, 3, False),
    (128, 256, 64, 8, 2, 8, 4, False),
    (128, 256, 64, 1, 2, 8, 4, False),
    (128, 128, 64, 8, 1, 4, 4, False),
    (128, 128, 64, 8, 2, 4, 4, True),
    (128, 256, 64, 8, 2, 4, 3, True),
    (128, 128, 64, 8, 1, 4, 4, True),  # Triton 3.6 specializes no kernel that splits its result
    (128, 256, 64, 8, 1, 4, 3, True),
]
FP8_CONFIG, FP8_SMALL = (128, 256, 128, 8, 2, 8, 4, False), (128, 128, 128, 8, 1, 8, 4, False)
