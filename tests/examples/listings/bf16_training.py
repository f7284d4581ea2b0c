import torch

model = Model()
model = model.to(memory_format=torch.channels_last)
criterion = torch.nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
model.train()
#################### code changes ####################
import intel_extension_for_pytorch as ipex
model, optimizer = ipex.optimize(model, optimizer=optimizer, dtype=torch.bfloat16)
######################################################
losses = []
for data, target in batches:
    with torch.cpu.amp.autocast():
        # Setting memory_format to torch.channels_last could improve performance
        # with 4D input data.
        data = data.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        output = model(data)
        loss = criterion(output, target)
        loss.backward()
    optimizer.step()
    losses.append(loss.item())
