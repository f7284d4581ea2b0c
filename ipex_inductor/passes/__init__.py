"""Graph passes: fusion rules as data, whole-op decomposition, and the weight prologue.

`joint.JointPass` runs them in Inductor's `joint_custom_pre_pass`; `prologue` runs later, on the
inference graph that is handed to the inner compiler.
"""
