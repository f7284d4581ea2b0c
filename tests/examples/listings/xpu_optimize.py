import torch
import intel_extension_for_pytorch as ipex

# bfloat16 inference case.
model = Model()
model.load_state_dict(torch.load(PATH))
model.eval()
optimized_model = ipex.xpu.optimize(model, dtype=torch.bfloat16)
# running evaluation step.
with torch.no_grad(), torch.autocast(model_device, torch.bfloat16):
    output = optimized_model(data)

# bfloat16 training case.
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model.train()
trained_model, trained_optimizer = ipex.xpu.optimize(model, dtype=torch.bfloat16, optimizer=optimizer)
# running training step.
with torch.autocast(model_device, torch.bfloat16):
    loss = trained_model(data).square().mean()
loss.backward()
trained_optimizer.step()
