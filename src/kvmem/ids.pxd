# The only place where these C types are defined. -1 is the only "none".
ctypedef int Token    # vocabulary id
ctypedef int Pos      # model position; M-RoPE repeats it inside an image
ctypedef int BlockId  # token index // block_tokens
ctypedef int SlotId   # block-sized place in the working set
ctypedef int CellId   # llama.cpp's place for one token: slot * block_tokens + index % block_tokens
