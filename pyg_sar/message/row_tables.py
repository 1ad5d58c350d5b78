"""Operators below autograd (``aten``, without overloads) by what they do with axes."""

from __future__ import annotations

#: Beside those that torch itself tags as pointwise.
POINTWISE = frozenset({
    "_prelu_kernel", "_to_copy", "bernoulli", "clone", "complex", "copy", "copy_", "copysign",
    "fill", "fill_", "floor_divide", "log_sigmoid_forward", "masked_fill", "masked_fill_",
    "native_dropout", "normal", "polar", "rrelu_with_noise", "view_as_complex_copy",
    "view_as_real_copy", "where",
})  # fmt: skip

#: The values themselves.
COPIES = frozenset({
    "_to_copy", "alias_copy", "clone", "contiguous", "copy", "copy_",
})  # fmt: skip

#: They reduce, sort or scan along given axes, or all; other axes apart.
ALONG = frozenset({
    "_cummax_helper", "_cummin_helper", "_fft_c2c", "_fft_c2r", "_fft_r2c", "_log_softmax",
    "_log_softmax_backward_data", "_safe_softmax", "_softmax", "_softmax_backward_data", "all",
    "amax", "amin", "aminmax", "any", "argmax", "argmin", "argsort", "count_nonzero", "cummax",
    "cummin", "cumprod", "cumsum", "dist", "dot", "glu", "kthvalue", "linalg_cross",
    "linalg_vector_norm", "logcumsumexp", "logsumexp", "max", "mean", "median", "min", "mode",
    "nanmedian", "nansum", "norm", "prod", "sort", "std", "std_mean", "sum", "topk", "trace",
    "var", "var_mean", "vdot",
})  # fmt: skip

#: Those of them whose result depends on the place.
SCANS = frozenset({
    "cummax", "cummin", "cumprod", "cumsum", "logcumsumexp",
})  # fmt: skip

#: Each element of the first axis apart.
BATCHED = frozenset({
    "_adaptive_avg_pool2d", "_convolution", "_scaled_dot_product_attention_math",
    "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu", "adaptive_max_pool2d", "avg_pool2d",
    "convolution", "max_pool2d_with_indices", "mkldnn_convolution", "native_group_norm",
    "spline_basis", "spline_weighting",
})  # fmt: skip

#: They move values, and compute nothing.
MOVES = frozenset({
    "cat", "constant_pad_nd", "diag_embed", "expand_copy", "flip", "permute_copy", "repeat",
    "roll", "select_copy", "select_scatter", "slice_copy", "slice_scatter", "stack", "tril",
    "triu", "unfold_copy", "unsqueeze_copy", "view_copy",
})  # fmt: skip

#: The same, or random numbers of the same kind, everywhere.
UNIFORM = frozenset({
    "bernoulli_", "empty", "empty_like", "empty_strided", "exponential_", "full", "full_like",
    "new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros", "normal_", "ones",
    "ones_like", "rand", "rand_like", "randint", "randint_like", "randn", "randn_like",
    "resize_", "scalar_tensor", "uniform_", "zero_", "zeros", "zeros_like",
})  # fmt: skip

#: They write by an index.
SCATTERS = frozenset({
    "index_add", "index_add_", "index_copy", "index_copy_", "index_fill", "index_fill_",
    "index_reduce", "index_reduce_", "scatter", "scatter_", "scatter_add", "scatter_add_",
    "scatter_reduce", "scatter_reduce_",
})  # fmt: skip
