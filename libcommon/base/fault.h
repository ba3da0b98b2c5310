/* Named fault points: PD_FAULT=point:fail:N[,point:fail:N...] makes the N-th pass (from 1) through a point fail, once; with `stop` for `fail` the process
 * stops there (SIGSTOP) until somebody who has changed the world meanwhile continues it, with `kill` it is gone (SIGKILL). PD_FAULT_COUNT=FILE: at its end the
 * process appends how often each call's point was passed.
 *
 * Points: malloc read write fsync mmap tmpfile, flip (a byte of KV on its way), flip_held (a bit of KV that a decode worker has
 * taken and verified), rdma_reg (memory for an RDMA device); and, to stop or kill, each state of
 * trace/state.h, passed when the process has told it. Compiled in by `make V=fault` and V=asan only; elsewhere pd_fault is the constant false. The code at a
 * point behaves as if the system had refused: an allocation gives NULL, a system call fails with EIO (write: ENOSPC; mmap, rdma_reg: ENOMEM; tmpfile: a file
 * system without unnamed files).
 */
#ifndef PD_BASE_FAULT_H
#define PD_BASE_FAULT_H
#include <stdbool.h>
#ifdef PD_FAULT
bool pd_fault(const char *point);
#else
static inline bool pd_fault(const char *point) { (void)point; return false; }
#endif
#endif
