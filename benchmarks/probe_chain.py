"""A probe: a block's last convolution and the next one's first in one kernel; stems by boxes; shortcuts.

    python benchmarks/probe_chain.py [CASE ...]

Each is held against fp32 and timed in a graph of such calls, the median in microseconds.
"""
import triton
import triton.language as tl


@triton.jit
def shortcut(X1, X2, W1, W2, B, Y, M, K1: tl.constexpr, K2: tl.constexpr, N: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, S: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr):
    """relu(X1 @ W1.T + X2[strided] @ W2.T + B); weights resident."""
    BLOCKS_N: tl.constexpr = N // BN
    step = tl.num_programs(0) // BLOCKS_N
    n = tl.program_id(0) % BLOCKS_N * BN + tl.arange(0, BN)
    k1 = tl.arange(0, K1)
    k2 = tl.arange(0, K2)
    w1 = tl.load(W1 + n[None, :] * K1 + k1[:, None])
    w2 = tl.load(W2 + n[None, :] * K2 + k2[:, None])
    b = tl.load(B + n).to(tl.float32)
    for tile in tl.range(tl.program_id(0) // BLOCKS_N, (M + BM - 1) // BM, step, num_stages=STAGES):
        m = tile * BM + tl.arange(0, BM)
        there = (m < M)[:, None]
        x1 = tl.load(X1 + m[:, None] * K1 + k1[None, :], mask=there, other=0.0)
        if S == 1:
            at = m
        else:
            at = (m // (OH * OW) * OH * S + m // OW % OH * S) * (OW * S) + m % OW * S
        x2 = tl.load(X2 + at[:, None] * K2 + k2[None, :], mask=there, other=0.0)
        acc = tl.dot(x1, w1)
        acc = tl.dot(x2, w2, acc) + b[None, :]
        acc = tl.maximum(acc, 0.0)
        tl.store(Y + m[:, None] * N + n[None, :], acc.to(Y.dtype.element_ty), mask=there)


@triton.jit
def chain(X, W1, B1, R, W2, B2, Y, Z, M, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
          BM: tl.constexpr, STAGES: tl.constexpr):
    """Y = relu(X @ W1.T + B1 + R); Z = relu(Y @ W2.T + B2); both weights resident."""
    k = tl.arange(0, K)
    p = tl.arange(0, P)
    n = tl.arange(0, N)
    b1 = tl.load(B1 + n).to(tl.float32)
    b2 = tl.load(B2 + p).to(tl.float32)
    w1 = tl.load(W1 + n[None, :] * K + k[:, None])
    w2 = tl.load(W2 + p[None, :] * N + n[:, None])
    for tile in tl.range(tl.program_id(0), (M + BM - 1) // BM, tl.num_programs(0), num_stages=STAGES):
        m = tile * BM + tl.arange(0, BM)
        there = (m < M)[:, None]
        x = tl.load(X + m[:, None] * K + k[None, :], mask=there, other=0.0)
        r = tl.load(R + m[:, None] * N + n[None, :], mask=there, other=0.0)
        acc = tl.dot(x, w1) + b1[None, :] + r.to(tl.float32)
        y = tl.maximum(acc, 0.0).to(Y.dtype.element_ty)
        tl.store(Y + m[:, None] * N + n[None, :], y, mask=there)
        acc2 = tl.dot(y, w2)
        z = tl.maximum(acc2 + b2[None, :], 0.0).to(Z.dtype.element_ty)
        tl.store(Z + m[:, None] * P + p[None, :], z, mask=there)


@triton.jit
def chain_tma(X, W1, B1, R, W2, B2, Y, Z, M, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, SHORT: tl.constexpr, Q: tl.constexpr):
    """As chain; one loop over blocks and chunks of columns, all by TMA. SHORT: R is X2, (M, Q), times W1's last Q columns."""
    xd = tl.make_tensor_descriptor(X, [M, K], [K, 1], [BM, K])
    w1d = tl.make_tensor_descriptor(W1, [N, K], [K, 1], [BN, K])
    w2d = tl.make_tensor_descriptor(W2, [P, N], [N, 1], [P, BN])
    rd = tl.make_tensor_descriptor(R, [M, N], [N, 1], [BM, BN])
    yd = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [BM, BN])
    zd = tl.make_tensor_descriptor(Z, [M, P], [P, 1], [BM, P])
    p = tl.arange(0, P)
    b2 = tl.load(B2 + p).to(tl.float32)
    C: tl.constexpr = N // BN
    blocks = (M + BM - 1) // BM
    count = (blocks - tl.program_id(0) + tl.num_programs(0) - 1) // tl.num_programs(0) * C
    acc2 = tl.zeros([BM, P], tl.float32)
    for i in tl.range(0, count, num_stages=STAGES):
        c = i % C
        m0 = (i // C * tl.num_programs(0) + tl.program_id(0)) * BM
        n0 = c * BN
        x = xd.load([m0, 0])
        w1 = w1d.load([n0, 0])
        w2 = w2d.load([0, n0])
        r = rd.load([m0, n0])
        b1 = tl.load(B1 + n0 + tl.arange(0, BN)).to(tl.float32)
        acc = tl.dot(x, w1.T) + b1[None, :] + r.to(tl.float32)
        y = tl.maximum(acc, 0.0).to(Y.dtype.element_ty)
        yd.store([m0, n0], y)
        acc2 = tl.dot(y, w2.T, acc2)
        if c == C - 1:
            zd.store([m0, 0], tl.maximum(acc2 + b2[None, :], 0.0).to(Z.dtype.element_ty))
            acc2 = tl.zeros([BM, P], tl.float32)


@triton.jit
def chain_short(X, W1, B1, X2, V, W2, B2, Y, Z, M, K: tl.constexpr, Q: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
          BM: tl.constexpr, STAGES: tl.constexpr):
    """Y = relu(X @ W1.T + X2 @ V.T + B1); Z = relu(Y @ W2.T + B2); weights resident."""
    k = tl.arange(0, K)
    q = tl.arange(0, Q)
    p = tl.arange(0, P)
    n = tl.arange(0, N)
    b1 = tl.load(B1 + n).to(tl.float32)
    b2 = tl.load(B2 + p).to(tl.float32)
    w1 = tl.load(W1 + n[None, :] * K + k[:, None])
    v = tl.load(V + n[None, :] * Q + q[:, None])
    w2 = tl.load(W2 + p[None, :] * N + n[:, None])
    for tile in tl.range(tl.program_id(0), (M + BM - 1) // BM, tl.num_programs(0), num_stages=STAGES):
        m = tile * BM + tl.arange(0, BM)
        there = (m < M)[:, None]
        x = tl.load(X + m[:, None] * K + k[None, :], mask=there, other=0.0)
        x2 = tl.load(X2 + m[:, None] * Q + q[None, :], mask=there, other=0.0)
        acc = tl.dot(x, w1)
        acc = tl.dot(x2, v, acc) + b1[None, :]
        y = tl.maximum(acc, 0.0).to(Y.dtype.element_ty)
        tl.store(Y + m[:, None] * N + n[None, :], y, mask=there)
        acc2 = tl.dot(y, w2)
        z = tl.maximum(acc2 + b2[None, :], 0.0).to(Z.dtype.element_ty)
        tl.store(Z + m[:, None] * P + p[None, :], z, mask=there)


@triton.jit
def stem(P, W, B, Y, N: tl.constexpr, H: tl.constexpr, PAIRS: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr,
         BH: tl.constexpr, BW: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr, BLOCKS: tl.constexpr):
    """7x7/2 of padded pairs (N, H, PAIRS, 8): windows as overlapping boxes. ROWS: lines of the result a row of boxes."""
    BM: tl.constexpr = BH * BW
    LINES: tl.constexpr = 5 + 2 * ROWS
    C: tl.constexpr = 64 * ROWS
    S: tl.constexpr = 2 * ROWS
    image = tl.make_tensor_descriptor(
        P, [N, H // S, S, OW, 32], [H * PAIRS * 8, S * PAIRS * 8, PAIRS * 8, 8, 1], [1, BH, 1, BW, 32])
    weights = tl.make_tensor_descriptor(W, [C, LINES * 32], [LINES * 32, 1], [C, 32])
    SH: tl.constexpr = OH // ROWS
    col = tl.arange(0, C)
    b = tl.load(B + col % 64).to(tl.float32)
    for block in tl.range(tl.program_id(0), BLOCKS, tl.num_programs(0), flatten=True):
        left = block % (OW // BW) * BW
        top = block // (OW // BW) % (SH // BH) * BH
        number = block // ((OW // BW) * (SH // BH))
        acc = tl.zeros([C, BM], tl.float32)
        for step in tl.range(0, LINES, num_stages=STAGES):
            y = step - 3 + 4
            given = image.load([number, top + y // S - 4 // S, y % S, left, 0])
            factors = weights.load([0, step * 32])
            acc = tl.dot(factors, given.reshape(BM, 32).T, acc)
        made = tl.maximum(acc.T + b[None, :], 0.0)
        at = tl.arange(0, BM)
        line = (top + at // BW)[:, None] * ROWS + (col // 64)[None, :]
        to = ((number * OH + line) * OW + (left + at % BW)[:, None]) * 64 + (col % 64)[None, :]
        tl.store(Y + to, made.to(Y.dtype.element_ty))


@triton.jit
def pad(X, P, H: tl.constexpr, W: tl.constexpr, PAIRS: tl.constexpr, COUNT, BLOCK: tl.constexpr):
    """(N, H, W, 3) to (N, H, PAIRS, 8) of two pixels of four channels, two pairs of zeros left."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = at // 8
    c = at % 4
    w = pair % PAIRS * 2 - 4 + at % 8 // 4
    there = (c < 3) & (w >= 0) & (w < W)
    x = tl.load(X + (pair // PAIRS * W + w) * 3 + c, mask=there, other=0.0)
    tl.store(P + at, x, mask=at < COUNT)


@triton.jit
def joined(X1, X2, W1, W2, B, Y, BATCH: tl.constexpr, H: tl.constexpr, W: tl.constexpr, S: tl.constexpr,
           K1: tl.constexpr, K2: tl.constexpr, N: tl.constexpr, BN: tl.constexpr, BH: tl.constexpr, BW: tl.constexpr,
           BLOCK_N: tl.constexpr, STAGES: tl.constexpr, BK: tl.constexpr):
    BM: tl.constexpr = BN * BH * BW
    first_image = tl.make_tensor_descriptor(X1, [BATCH, H, W, K1], [H * W * K1, W * K1, K1, 1], [BN, BH, BW, BK])
    second = tl.make_tensor_descriptor(X2, [BATCH, H, S, W, S * K2], [H * S * W * S * K2, S * W * S * K2, W * S * K2, S * K2, 1], [BN, BH, 1, BW, BK])
    w1d = tl.make_tensor_descriptor(W1, [N, K1], [K1, 1], [BLOCK_N, BK])
    w2d = tl.make_tensor_descriptor(W2, [N, K2], [K2, 1], [BLOCK_N, BK])
    BOXES_W: tl.constexpr = (W + BW - 1) // BW
    BOXES_H: tl.constexpr = (H + BH - 1) // BH
    BOXES_N: tl.constexpr = (BATCH + BN - 1) // BN
    COLS: tl.constexpr = N // BLOCK_N
    for block in tl.range(tl.program_id(0), BOXES_W * BOXES_H * BOXES_N * COLS, tl.num_programs(0)):
        first = block % COLS * BLOCK_N
        box = block // COLS
        left = box % BOXES_W * BW
        top = box // BOXES_W % BOXES_H * BH
        begin = box // BOXES_W // BOXES_H * BN
        acc = tl.zeros([BLOCK_N, BM], tl.float32)
        for k in tl.range(0, K1, BK, num_stages=STAGES):
            g = first_image.load([begin, top, left, k])
            acc = tl.dot(w1d.load([first, k]), g.reshape(BM, BK).T, acc)
        for k in tl.range(0, K2, BK, num_stages=STAGES):
            g = second.load([begin, top, 0, left, k])
            acc = tl.dot(w2d.load([first, k]), g.reshape(BM, BK).T, acc)
        at = tl.arange(0, BM)
        out = first + tl.arange(0, BLOCK_N)
        made = tl.maximum(acc.T + tl.load(B + out).to(tl.float32)[None, :], 0.0)
        n = begin + at // (BH * BW)
        y = top + at // BW % BH
        x = left + at % BW
        inside = (n < BATCH) & (y < H) & (x < W)
        to = ((n * H + y) * W + x)[:, None] * N + out[None, :]
        tl.store(Y + to, made.to(Y.dtype.element_ty), mask=inside[:, None])


@triton.jit
def chain_res(X, W1, B1, R, W2, B2, Y, Z, M, K: tl.constexpr, N: tl.constexpr, P: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr, TMA: tl.constexpr):
    """Y = relu(X @ W1.T + B1 + R); Z = relu(Y @ W2.T + B2); both weights resident, in four chunks of columns."""
    k = tl.arange(0, K)
    p = tl.arange(0, P)
    n = tl.arange(0, BN)
    b2 = tl.load(B2 + p).to(tl.float32)
    w10 = tl.load(W1 + n[None, :] * K + k[:, None])
    w11 = tl.load(W1 + (n + BN)[None, :] * K + k[:, None])
    w12 = tl.load(W1 + (n + 2 * BN)[None, :] * K + k[:, None])
    w13 = tl.load(W1 + (n + 3 * BN)[None, :] * K + k[:, None])
    w20 = tl.load(W2 + p[None, :] * N + n[:, None])
    w21 = tl.load(W2 + p[None, :] * N + (n + BN)[:, None])
    w22 = tl.load(W2 + p[None, :] * N + (n + 2 * BN)[:, None])
    w23 = tl.load(W2 + p[None, :] * N + (n + 3 * BN)[:, None])
    b10 = tl.load(B1 + n).to(tl.float32)
    b11 = tl.load(B1 + n + BN).to(tl.float32)
    b12 = tl.load(B1 + n + 2 * BN).to(tl.float32)
    b13 = tl.load(B1 + n + 3 * BN).to(tl.float32)
    if TMA:
        rd = tl.make_tensor_descriptor(R, [M, N], [N, 1], [BM, BN])
        xd = tl.make_tensor_descriptor(X, [M, K], [K, 1], [BM, K])
        yd = tl.make_tensor_descriptor(Y, [M, N], [N, 1], [BM, BN])
        zd = tl.make_tensor_descriptor(Z, [M, P], [P, 1], [BM, P])
    for tile in tl.range(tl.program_id(0), (M + BM - 1) // BM, tl.num_programs(0), num_stages=STAGES):
        m0 = tile * BM
        m = m0 + tl.arange(0, BM)
        there = (m < M)[:, None]
        at = m[:, None] * N + n[None, :]
        if TMA:
            x = xd.load([m0, 0])
            r0 = rd.load([m0, 0])
            r1 = rd.load([m0, BN])
            r2 = rd.load([m0, 2 * BN])
            r3 = rd.load([m0, 3 * BN])
        else:
            x = tl.load(X + m[:, None] * K + k[None, :], mask=there, other=0.0)
            r0 = tl.load(R + at, mask=there, other=0.0)
            r1 = tl.load(R + at + BN, mask=there, other=0.0)
            r2 = tl.load(R + at + 2 * BN, mask=there, other=0.0)
            r3 = tl.load(R + at + 3 * BN, mask=there, other=0.0)
        y = tl.maximum(tl.dot(x, w10) + b10[None, :] + r0.to(tl.float32), 0.0).to(Y.dtype.element_ty)
        if TMA:
            yd.store([m0, 0], y)
        else:
            tl.store(Y + at, y, mask=there)
        acc = tl.dot(y, w20)
        y = tl.maximum(tl.dot(x, w11) + b11[None, :] + r1.to(tl.float32), 0.0).to(Y.dtype.element_ty)
        if TMA:
            yd.store([m0, BN], y)
        else:
            tl.store(Y + at + BN, y, mask=there)
        acc = tl.dot(y, w21, acc)
        y = tl.maximum(tl.dot(x, w12) + b12[None, :] + r2.to(tl.float32), 0.0).to(Y.dtype.element_ty)
        if TMA:
            yd.store([m0, 2 * BN], y)
        else:
            tl.store(Y + at + 2 * BN, y, mask=there)
        acc = tl.dot(y, w22, acc)
        y = tl.maximum(tl.dot(x, w13) + b13[None, :] + r3.to(tl.float32), 0.0).to(Y.dtype.element_ty)
        if TMA:
            yd.store([m0, 3 * BN], y)
        else:
            tl.store(Y + at + 3 * BN, y, mask=there)
        acc = tl.dot(y, w23, acc)
        z = tl.maximum(acc + b2[None, :], 0.0).to(Z.dtype.element_ty)
        if TMA:
            zd.store([m0, 0], z)
        else:
            tl.store(Z + m[:, None] * P + p[None, :], z, mask=there)
import sys, os, time, json, statistics
import types
import torch
kernels = types.SimpleNamespace(**globals())
OUT=open(os.environ["OUT"]+"/probe.jsonl","a") if os.environ.get("OUT") else sys.stderr
d="cuda"; bf=torch.bfloat16
def alloc(size, align, stream): return torch.empty(size, device=d, dtype=torch.int8)
triton.set_allocator(alloc)
SMS=torch.cuda.get_device_properties(0).multi_processor_count
torch.backends.cudnn.benchmark=True
def timed(f, n=20, reps=7):
    s=torch.cuda.Stream()
    with torch.cuda.stream(s):
        for _ in range(2): f()
    torch.cuda.synchronize()
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n): f()
    g.replay(); torch.cuda.synchronize()
    out=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        a.record(); g.replay(); b.record(); torch.cuda.synchronize(); out.append(a.elapsed_time(b)*1000/n)
    return statistics.median(out)
def say(name, us, **kw):
    print(json.dumps({"name":name,"us":round(us,1),**kw}),file=OUT,flush=True); print(name,round(us,1),kw,flush=True)
def close(name,a,b):
    e=((a.float()-b.float()).norm()/b.float().norm()).item()
    if not e<6e-3: print("WRONG",name,e,flush=True)
    return round(e,5)
def attempt(name, f, check=None, **kw):
    try:
        k=f(); torch.cuda.synchronize()
        e=[close(name,x,y) for x,y in check()] if check else None
        say(name,timed(f),err=e,regs=getattr(k,"n_regs",None),spills=getattr(k,"n_spills",None),**kw)
    except Exception as x:
        print("FAILED",name,kw,str(x)[:200].replace("\n"," "),flush=True)
def r(*s,scale=1.0): return (torch.randn(*s,device=d)*scale).to(bf)
relu=torch.relu
def img(t,n,h,w): return t.view(n,h,w,-1).permute(0,3,1,2)
def wt(w): return w[:,:,None,None].contiguous(memory_format=torch.channels_last)
only=sys.argv[1:]
conv=torch.ops.aten.cudnn_convolution_relu; conva=torch.ops.aten.cudnn_convolution_add_relu
def pair_case(n,h,K,N,P,tma,variants):
    M=n*h*h
    X,R=r(M,K),r(M,N); W1,W2=r(N,K,scale=K**-.5),r(P,N,scale=N**-.5); B1,B2=r(N),r(P)
    Y=torch.empty(M,N,device=d,dtype=bf); Z=torch.empty(M,P,device=d,dtype=bf)
    y=relu(X.float()@W1.float().t()+B1.float()+R.float()).to(bf); z=relu(y.float()@W2.float().t()+B2.float()).to(bf)
    one=[1,1],[0,0],[1,1],1
    xi,ri,yi=img(X,n,h,h),img(R,n,h,h),img(Y,n,h,h)
    w1,w2=wt(W1),wt(W2)
    attempt(f"cudnn expand+add {K}->{N}@{h}",lambda:(conva(xi,w1,ri,1.0,B1,*one),None)[1])
    attempt(f"cudnn reduce {N}->{P}@{h}",lambda:(conv(yi,w2,B2,*one),None)[1])
    for v in variants:
        bm,bn,warps,st,per=v
        grid=(min(SMS*per,-(-M//bm)),)
        if tma: f=lambda:kernels.chain_tma[grid](X,W1,B1,R,W2,B2,Y,Z,M,K,N,P,bm,bn,st,False,0,num_warps=warps)
        else: f=lambda:kernels.chain[grid](X,W1,B1,R,W2,B2,Y,Z,M,K,N,P,bm,st,num_warps=warps)
        Y.fill_(float("nan")); Z.fill_(float("nan"))
        attempt(f"chain{'_tma' if tma else ''} {K}->{N}->{P}@{h}",f,lambda:[(Y,y),(Z,z)],v=v)
def short_case(n,h,K,Q,N,s,variants,P=None,chains=()):
    M=n*h*h
    X,X2=r(M,K),r(n*h*s*h*s,Q); W1,V=r(N,K,scale=K**-.5),r(N,Q,scale=Q**-.5); B=r(N)
    Y=torch.empty(M,N,device=d,dtype=bf)
    x2=X2.view(n,h*s,h*s,Q)[:,::s,::s].reshape(M,Q)
    y=relu(X.float()@W1.float().t()+x2.float()@V.float().t()+B.float()).to(bf)
    w1,v_=wt(W1),wt(V); xi,x2i=img(X,n,h,h),img(X2,n,h*s,h*s); yi=img(Y,n,h,h)
    attempt(f"cudnn conv {Q}->{N}@{h} s{s}",lambda:(torch.nn.functional.conv2d(x2i,v_,None,s),None)[1])
    attempt(f"cudnn expand+add {K}->{N}@{h}",lambda:(conva(xi,w1,yi,1.0,B,[1,1],[0,0],[1,1],1),None)[1])
    for v in variants:
        bm,bn,warps,st,per=v
        nb=N//bn; grid=(min(SMS*per//nb*nb,-(-M//bm)*nb),)
        f=lambda:kernels.shortcut[grid](X,X2,W1,V,B,Y,M,K,Q,N,bm,bn,st,s,h,h,num_warps=warps)
        Y.fill_(float("nan"))
        attempt(f"shortcut {K}+{Q}->{N}@{h} s{s}",f,lambda:[(Y,y)],v=v)
    if P:
        W2,B2=r(P,N,scale=N**-.5),r(P); Z=torch.empty(M,P,device=d,dtype=bf); z=relu(y.float()@W2.float().t()+B2.float()).to(bf)
        for v in chains:
            bm,warps,st,per=v
            grid=(min(SMS*per,-(-M//bm)),)
            f=lambda:kernels.chain_short[grid](X,W1,B,X2,V,W2,B2,Y,Z,M,K,Q,N,P,bm,st,num_warps=warps)
            Y.fill_(float("nan")); Z.fill_(float("nan"))
            attempt(f"chain_short {K}+{Q}->{N}->{P}@{h}",f,lambda:[(Y,y),(Z,z)],v=v)
def stem_case(n):
    X=r(n,224,224,3); W=r(64,3,7,7,scale=0.08); B=r(64)
    P=torch.empty(n,224,115,8,device=d,dtype=bf); Y=torch.empty(n,112,112,64,device=d,dtype=bf)
    c=P.numel()
    attempt("pad",lambda:kernels.pad[(-(-c//2048),)](X,P,224,224,115,c,2048,num_warps=4))
    ref=relu(torch.nn.functional.conv2d(X.permute(0,3,1,2).float(),W.float(),B.float(),2,3)).permute(0,2,3,1).to(bf)
    full=torch.zeros(64,7,8,4,device=d); full[:,:,1:,:3]=W.float().permute(0,2,3,1); full=full.view(64,7,32)
    for rows,bh,bw,warps,st,per in [(1,8,16,4,4,3),(1,8,16,8,4,2),(1,16,16,8,4,2),(1,16,16,8,7,1),(1,4,16,4,4,4),(2,8,16,8,4,2),(2,8,16,8,3,2),(2,8,16,4,4,2),(2,4,16,4,4,3),(2,8,8,4,4,3)]:
        lines=5+2*rows; w=torch.zeros(rows,64,lines,32,device=d)
        for i in range(rows): w[i,:,2*i:2*i+7]=full
        w=w.reshape(rows*64,lines*32).to(bf).contiguous()
        if (112//rows)%bh: continue
        blocks=n*(112//rows//bh)*(112//bw)
        Y.fill_(float("nan"))
        f=lambda:kernels.stem[(min(SMS*per,blocks),)](P,w,B,Y,n,224,115,112,112,bh,bw,rows,st,blocks,num_warps=warps)
        attempt("stem",f,lambda:[(Y,ref)],v=(rows,bh,bw,warps,st,per))
def res_case(n,h,K,N,P,variants):
    M=n*h*h
    X,R=r(M,K),r(M,N); W1,W2=r(N,K,scale=K**-.5),r(P,N,scale=N**-.5); B1,B2=r(N),r(P)
    Y=torch.empty(M,N,device=d,dtype=bf); Z=torch.empty(M,P,device=d,dtype=bf)
    y=relu(X.float()@W1.float().t()+B1.float()+R.float()).to(bf); z=relu(y.float()@W2.float().t()+B2.float()).to(bf)
    for v in variants:
        bm,warps,st,per,tma=v
        f=lambda:kernels.chain_res[(min(SMS*per,-(-M//bm)),)](X,W1,B1,R,W2,B2,Y,Z,M,K,N,P,bm,64,st,tma,num_warps=warps)
        Y.fill_(float("nan")); Z.fill_(float("nan"))
        attempt(f"chain_res {K}->{N}->{P}@{h}",f,lambda:[(Y,y),(Z,z)],v=v)
def joined_case(n,h,K,Q,N,s,variants):
    M=n*h*h
    X,X2=r(M,K),r(n*h*s*h*s,Q); W1,V=r(N,K,scale=K**-.5),r(N,Q,scale=Q**-.5); B=r(N)
    Y=torch.empty(M,N,device=d,dtype=bf)
    x2=X2.view(n,h*s,h*s,Q)[:,::s,::s].reshape(M,Q)
    y=relu(X.float()@W1.float().t()+x2.float()@V.float().t()+B.float()).to(bf)
    w1,v_=wt(W1),wt(V); xi,x2i=img(X,n,h,h),img(X2,n,h*s,h*s); yi=img(Y,n,h,h)
    attempt(f"cudnn conv {Q}->{N}@{h} s{s}",lambda:(torch.nn.functional.conv2d(x2i,v_,None,s),None)[1])
    attempt(f"cudnn expand+add {K}->{N}@{h}",lambda:(conva(xi,w1,yi,1.0,B,[1,1],[0,0],[1,1],1),None)[1])
    for v in variants:
        bn,bh,bw,cols,warps,st,per=v
        blocks=-(-n//bn)*-(-h//bh)*-(-h//bw)*(N//cols)
        f=lambda:kernels.joined[(min(SMS*per,blocks),)](X,X2,W1,V,B,Y,n,h,h,s,K,Q,N,bn,bh,bw,cols,st,64,num_warps=warps)
        Y.fill_(float("nan"))
        attempt(f"joined {K}+{Q}->{N}@{h} s{s}",f,lambda:[(Y,y)],v=v)
J=lambda *b:[(*b,128,4,3,2),(*b,128,8,4,1),(*b,128,8,3,2),(*b,256,8,3,1),(*b,64,4,4,2)]
new={
 "res56":lambda:res_case(128,56,64,256,64,[(64,4,3,1,1),(64,4,2,1,1),(128,8,2,1,1)]),
 "tma56":lambda:pair_case(128,56,64,256,64,True,[(64,64,4,3,2),(64,32,4,4,2),(64,32,4,3,3),(128,32,8,4,1),(64,64,4,4,2),(64,64,8,3,2)]),
 "tma28":lambda:pair_case(128,28,128,512,128,True,[(64,64,4,3,1),(64,32,4,3,2),(64,32,8,4,1),(64,64,8,3,1)]),
}
cases={
 "chain56":lambda:pair_case(128,56,64,256,64,False,[(128,0,8,2,1),(64,0,4,3,1),(64,0,8,3,1),(64,0,4,2,1)]),
 "chain56b":lambda:pair_case(128,56,64,256,128,False,[(128,0,8,2,1),(64,0,4,3,1),(64,0,8,3,1)]),
 "chain28":lambda:pair_case(128,28,128,512,128,True,[(128,64,8,2,1),(64,64,4,3,1),(128,32,8,3,1),(64,32,4,4,1),(64,128,4,2,1)]),
 "chain56t":lambda:pair_case(128,56,64,256,64,True,[(128,64,8,3,1),(128,64,8,2,1),(64,64,4,3,2),(128,128,8,2,1)]),
 "short56":lambda:short_case(128,56,64,64,256,1,[(128,128,8,3,1),(128,256,8,2,1),(64,256,8,3,1),(64,256,4,3,1),(64,128,4,2,2),(64,128,4,3,2)],64,[(128,8,2,1),(128,8,3,1),(64,4,3,1),(64,8,3,1)]),
 "short28":lambda:short_case(128,28,128,256,512,2,[(64,128,8,2,1),(64,128,4,2,1),(128,128,8,1,1),(64,64,4,2,1),(128,64,8,2,1)]),
 "stem":lambda:stem_case(128),
}
cases |= new
for name in only or cases:
    t=time.time(); cases[name](); print("==",name,round(time.time()-t,1),flush=True)

