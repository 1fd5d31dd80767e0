"""Operations on states, artifacts and KV: for each, the plain torch reference and the Triton kernel side by side.

Every operation is one function with ``impl="torch" | "triton"``; by default CUDA tensors take Triton, others torch.
A *plan* (``XPlan.build``) is made once per batch from host data and serves every layer; the operations themselves
neither wait for the device nor loop over tokens in Python.
"""
