"""Graph passes: fusion rules as data, whole-op decomposition, and the weight prologue.

`joint.JointPass` runs most of them in Inductor's `joint_custom_pre_pass`. `weights.prologue` runs
later, on the inference graph that is handed to the inner compiler.
"""
