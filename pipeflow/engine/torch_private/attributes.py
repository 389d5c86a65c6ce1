"""Private attributes of torch's objects, which the other packages use in place. Nothing public reads or sets them.
Must not contain: private names that can be imported; those are in the files beside this one.
"""

from __future__ import annotations

_FSDP = "torch.distributed.fsdp._fully_shard."
_SCHEDULES = "torch.distributed.pipelining.schedules."

ATTRIBUTES: dict[str, dict[str, str]] = {
    "torch.nn.Module": {
        "_parameters": "the module's own parameters, None included, which can be replaced",
        "_buffers": "its own buffers",
        "_modules": "its children",
        "_non_persistent_buffers_set": "the names of buffers that checkpoints leave out",
        "_apply": "moves and converts its tensors; subclasses extend it",
        "_call_impl": "calls the forward with its hooks, where __call__ is replaced",
        "_compiled_call_impl": "what Module.compile made of the call",
        "_forward_hooks": "its hooks: public functions add some, and do not list them",
        "_forward_pre_hooks": "its hooks before the forward",
    },
    "torch.Tensor": {
        "_version": "how often it was written in place",
        "_is_view": "whether it is a view; Tensor._base is None without gradients",
        "_values": "the values of a sparse tensor, not detached",
        "_backward_hooks": "its hooks: public functions add some, and do not list them",
        "_post_accumulate_grad_hooks": "its hooks after its gradient was added",
    },
    "torch.UntypedStorage": {"_cdata": "the address of the storage's object"},
    "torch._ops.OpOverload": {"_schema": "the names, defaults and aliases of an operator's arguments"},
    "torch.nn.Conv2d": {
        "_conv_forward": "the convolution with another weight",
        "_reversed_padding_repeated_twice": "the padding as torch.nn.functional.pad takes it",
    },
    "torch.optim.AdamW": {"_step_supports_amp_scaling": "whether its kernels skip a step where `found_inf` is 1"},
    "torch.optim.lr_scheduler.LRScheduler": {"_opt_called": "set on an optimizer that has made a step"},
    "torch.nn.utils.clip_grad": {"_clip_grads_with_norm_": "what all functions that clip by norm call"},
    "torch._dynamo.eval_frame.OptimizedModule": {"_orig_mod": "the module that torch.compile has wrapped"},
    "torch._functorch._aot_autograd.utils": {"_boxed_call": "marks code that takes its arguments in a list"},
    "torch.distributed.ProcessGroup": {
        "_allgather_base": "all_gather of a group without the checks of torch.distributed",
        "_reduce_scatter_base": "reduce_scatter of a group without them",
        "_device_types": "the devices for which a group has a backend",
        "_get_backend": "the backend of a group for a device",
    },
    "torch.distributed.ProcessGroupGloo": {
        "_Options": "the class of gloo's options",
        "_get_sequence_number_for_group": "how many collectives a backend has begun",
    },
    "torch.distributed.ProcessGroupGloo._Options": {
        "_devices": "the addresses at which gloo listens",
        "_timeout": "how long ranks wait to connect",
    },
    f"{_FSDP}FSDPModule": {"_get_fsdp_state": "the state of a module under fully_shard"},
    f"{_FSDP}_fsdp_state.FSDPState": {
        "_fsdp_param_groups": "the groups of parameters that are gathered together",
        "_is_root": "whether the state belongs to the outermost module",
        "_lazy_init": "what the first forward does",
    },
    f"{_FSDP}_fsdp_param_group.FSDPParamGroup": {"_all_gather_result": "the gather under way"},
    f"{_FSDP}_fsdp_param.FSDPParam": {"_unsharded_param": "the whole parameter, once it was gathered"},
    "torch.distributed.fsdp.FullyShardedDataParallel": {
        "_handle": "the handle of a module's flat parameter",
        "_fsdp_wrapped_module": "the module that it wraps",
    },
    "torch.distributed.fsdp._flat_param.FlatParameter": {
        "_fqns": "the names of the parameters in a flat parameter",
        "_shapes": "their shapes",
        "_shard_param_infos": "which part of each is in the rank's shard",
        "_params": "the parameters, with use_orig_params",
        "_local_shard": "the rank's shard",
    },
    f"{_SCHEDULES}_PipelineSchedule": {
        "_has_backward": "whether the schedule has a loss",
        "_loss_fn": "the loss",
        "_compute_loss": "calls it",
        "_merge_outputs": "merges the outputs of microbatches",
        "_n_microbatches": "the number of microbatches",
        "_split_inputs": "splits a batch",
    },
    f"{_SCHEDULES}PipelineScheduleSingle": {
        "_num_stages": "the number of stages of all ranks",
        "_stage": "the rank's stage",
    },
    f"{_SCHEDULES}PipelineScheduleMulti": {"_stages": "the rank's stages"},
    f"{_SCHEDULES}_PipelineScheduleRuntime": {
        "_comp_type_to_function_map": "the functions that a program has registered",
        "_prepare_schedule_with_comms": "makes the table of transfers",
    },
}
"""For each class or module, its attributes, and what each stands for."""
