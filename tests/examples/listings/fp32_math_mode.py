import intel_extension_for_pytorch as ipex

# to get the current fpmath mode
modes = [ipex.get_fp32_math_mode(device="cpu")]
# to enable the implicit data type conversion
ipex.set_fp32_math_mode(device="cpu", mode=ipex.FP32MathMode.BF32)
modes.append(ipex.get_fp32_math_mode(device="cpu"))
# to disable the implicit data type conversion
ipex.set_fp32_math_mode(device="cpu", mode=ipex.FP32MathMode.FP32)
modes.append(ipex.get_fp32_math_mode(device="cpu"))
# the same for Intel GPUs
ipex.xpu.set_fp32_math_mode(device="xpu", mode=ipex.FP32MathMode.FP32)
modes.append(ipex.xpu.get_fp32_math_mode(device="xpu"))
