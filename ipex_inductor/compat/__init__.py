"""Every difference between the torch versions that we support; callers write `compat.name`.

Each file covers one part of torch. No other file reads torch's version.
"""

from ipex_inductor.compat.aot_autograd import backward_at_once as backward_at_once
from ipex_inductor.compat.aot_autograd import backward_too as backward_too
from ipex_inductor.compat.aot_autograd import is_own_input as is_own_input
from ipex_inductor.compat.aot_autograd import results_of as results_of
from ipex_inductor.compat.aot_autograd import skip_op_analysis as skip_op_analysis
from ipex_inductor.compat.aot_autograd import static_inputs as static_inputs
from ipex_inductor.compat.captures import cudnn_settings as cudnn_settings
from ipex_inductor.compat.captures import drop_cublas_memory as drop_cublas_memory
from ipex_inductor.compat.captures import end_capture as end_capture
from ipex_inductor.compat.captures import is_traced as is_traced
from ipex_inductor.compat.captures import uncapturable as uncapturable
from ipex_inductor.compat.cpp_wrapper import check_has_cpp as check_has_cpp
from ipex_inductor.compat.cpp_wrapper import wrapping as wrapping
from ipex_inductor.compat.devices import TOOLKITS as TOOLKITS
from ipex_inductor.compat.devices import adds_to_one_pixel as adds_to_one_pixel
from ipex_inductor.compat.devices import convolves_itself as convolves_itself
from ipex_inductor.compat.devices import prefers_cudnn_attention as prefers_cudnn_attention
from ipex_inductor.compat.devices import why_not_for as why_not_for
from ipex_inductor.compat.dynamo import around_next_compile as around_next_compile
from ipex_inductor.compat.dynamo import at_end_of_compile as at_end_of_compile
from ipex_inductor.compat.dynamo import callers_name as callers_name
from ipex_inductor.compat.dynamo import compiling_alone as compiling_alone
from ipex_inductor.compat.dynamo import drop_guards as drop_guards
from ipex_inductor.compat.dynamo import dynamo_unchanged as dynamo_unchanged
from ipex_inductor.compat.dynamo import hide_from_dynamo as hide_from_dynamo
from ipex_inductor.compat.dynamo import is_control_flow as is_control_flow
from ipex_inductor.compat.dynamo import is_sharded as is_sharded
from ipex_inductor.compat.dynamo import is_traced_by_others as is_traced_by_others
from ipex_inductor.compat.dynamo import restore_counters as restore_counters
from ipex_inductor.compat.dynamo import tensors_unprinted as tensors_unprinted
from ipex_inductor.compat.dynamo import traced_name as traced_name
from ipex_inductor.compat.engine import at_end_of_backward as at_end_of_backward
from ipex_inductor.compat.engine import backward_number as backward_number
from ipex_inductor.compat.engine import checkpointed_region as checkpointed_region
from ipex_inductor.compat.engine import compile_with_callers_alone as compile_with_callers_alone
from ipex_inductor.compat.engine import group_name as group_name
from ipex_inductor.compat.engine import left_to_eager_mode as left_to_eager_mode
from ipex_inductor.compat.engine import reduce_largest as reduce_largest
from ipex_inductor.compat.engine import runs_compiled_backward as runs_compiled_backward
from ipex_inductor.compat.files import cache_folder as cache_folder
from ipex_inductor.compat.files import named_folder as named_folder
from ipex_inductor.compat.fused_sgd import mend_fused_sgd as mend_fused_sgd
from ipex_inductor.compat.fused_sgd import mended_sgd as mended_sgd
from ipex_inductor.compat.fused_sgd import needs_mended_sgd as needs_mended_sgd
from ipex_inductor.compat.headers import HEADER as HEADER
from ipex_inductor.compat.headers import kernel_command as kernel_command
from ipex_inductor.compat.headers import use_headers as use_headers
from ipex_inductor.compat.inductor import KEPT_GRAPHS as KEPT_GRAPHS
from ipex_inductor.compat.inductor import LOWER_ONLY as LOWER_ONLY
from ipex_inductor.compat.inductor import compile_inner as compile_inner
from ipex_inductor.compat.inductor import compiles_in_this_process as compiles_in_this_process
from ipex_inductor.compat.inductor import (
    computes_shared_parts_again as computes_shared_parts_again,
)
from ipex_inductor.compat.inductor import decomposition_table as decomposition_table
from ipex_inductor.compat.inductor import graph_caches_are_off as graph_caches_are_off
from ipex_inductor.compat.inductor import graph_caches_off as graph_caches_off
from ipex_inductor.compat.inductor import lower_inner as lower_inner
from ipex_inductor.compat.inductor import name_system as name_system
from ipex_inductor.compat.inductor import no_early_workers as no_early_workers
from ipex_inductor.compat.inductor import read_inner as read_inner
from ipex_inductor.compat.inductor import reload_graph as reload_graph
from ipex_inductor.compat.levels import compiles_for_levels as compiles_for_levels
from ipex_inductor.compat.levels import use_portable_names as use_portable_names
from ipex_inductor.compat.levels import vectors as vectors
from ipex_inductor.compat.lowered import is_lowered as is_lowered
from ipex_inductor.compat.module_hooks import module_calls_observed as module_calls_observed
from ipex_inductor.compat.packages import compile_ahead as compile_ahead
from ipex_inductor.compat.packages import export_model as export_model
from ipex_inductor.compat.packages import package_runner as package_runner
from ipex_inductor.compat.packages import why_not_ahead as why_not_ahead
from ipex_inductor.compat.private_memory import open_storage as open_storage
from ipex_inductor.compat.private_memory import tensor_data as tensor_data
from ipex_inductor.compat.quantized import NATIVE_ATTENTION as NATIVE_ATTENTION
from ipex_inductor.compat.quantized import FunctionsUnseen as FunctionsUnseen
from ipex_inductor.compat.quantized import one_as_any_size as one_as_any_size
from ipex_inductor.compat.quantized import quantized_ops as quantized_ops
from ipex_inductor.compat.reductions import stores_in_blocks as stores_in_blocks
from ipex_inductor.compat.reinplacing import reinplacing_checked as reinplacing_checked
from ipex_inductor.compat.settings import USERS_PASSES as USERS_PASSES
from ipex_inductor.compat.settings import any_host as any_host
from ipex_inductor.compat.settings import as_pass_list as as_pass_list
from ipex_inductor.compat.settings import caches_forbidden as caches_forbidden
from ipex_inductor.compat.settings import inductor_changes as inductor_changes
from ipex_inductor.compat.settings import inductor_option_types as inductor_option_types
from ipex_inductor.compat.settings import mode_options as mode_options
from ipex_inductor.compat.settings import register_log as register_log
from ipex_inductor.compat.settings import uuids_of as uuids_of
from ipex_inductor.compat.settings import why_no_graph_cache as why_no_graph_cache
from ipex_inductor.compat.symbols import hints as hints
from ipex_inductor.compat.symbols import is_channels_last as is_channels_last
from ipex_inductor.compat.symbols import range_of as range_of
from ipex_inductor.compat.symbols import sizes as sizes
from ipex_inductor.compat.templates import (
    templates_compiled_when_used as templates_compiled_when_used,
)
from ipex_inductor.compat.toolchain import compiler_missing as compiler_missing
from ipex_inductor.compat.toolchain import cxx as cxx
from ipex_inductor.compat.toolchain import cxx_flags as cxx_flags
from ipex_inductor.compat.toolchain import without_torchs_own as without_torchs_own
from ipex_inductor.compat.tries import vectors_tried as vectors_tried
from ipex_inductor.compat.versions import TEMPLATES as TEMPLATES
from ipex_inductor.compat.versions import TESTED as TESTED
from ipex_inductor.compat.versions import VERSION as VERSION
from ipex_inductor.compat.versions import torch_minor as torch_minor
from ipex_inductor.compat.versions import untested_reason as untested_reason
from ipex_inductor.compat.workers import compilers as compilers
from ipex_inductor.compat.workers import (
    compiles_anew_in_this_process as compiles_anew_in_this_process,
)
from ipex_inductor.compat.workers import kernels_put_off as kernels_put_off
from ipex_inductor.compat.workers import start_workers as start_workers
