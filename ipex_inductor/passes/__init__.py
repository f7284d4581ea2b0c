"""Graph passes: fusion rules as data, whole-op decomposition, and the weight preprocessing.

`joint.PASSES` lists most of them in order; `joint.JointPass` runs them in Inductor's
`joint_custom_pre_pass`. `weights.prologue` runs later, on the inference graph that is handed to the
inner compiler.
"""
