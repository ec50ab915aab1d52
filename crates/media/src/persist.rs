//! Writing stores out of the CPU's caches, with the best instructions that it has.

/// How stores to a mapping are made durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Persist {
    /// Nothing is done: a store is as durable as this mapping can make it.
    Stores,
    /// Cache lines are written back, which is durable on persistent memory (assumption M5).
    #[cfg(target_arch = "x86_64")]
    Lines(LineFlush),
    /// `msync`: for CPUs without a known instruction for cache lines.
    #[cfg(not(target_arch = "x86_64"))]
    Sync,
}

/// The instruction that writes a cache line back.
#[cfg(target_arch = "x86_64")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LineFlush {
    /// `clwb`: keeps the line in the cache; ordered by `sfence`.
    WriteBack,
    /// `clflushopt`: evicts the line; ordered by `sfence`.
    FlushOpt,
    /// `clflush`: evicts the line. Several of them run one after the other. Every x86-64 has it.
    Flush,
}

/// Size of a cache line in bytes.
const LINE_BYTES: usize = 64;

impl Persist {
    /// The best way to write lines back on this CPU.
    pub(crate) fn lines() -> Persist {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{__cpuid, __cpuid_count};
            // Bits of CPUID leaf 7, register EBX (Intel SDM vol. 2A; AMD APM vol. 3).
            const HAS_CLWB: u32 = 1 << 24;
            const HAS_CLFLUSHOPT: u32 = 1 << 23;
            // SAFETY: every x86-64 has the instruction. (Newer toolchains know that themselves.)
            #[allow(unused_unsafe)]
            let features = unsafe {
                // Leaf 0 returns the number of the last leaf.
                match __cpuid(0).eax {
                    7.. => __cpuid_count(7, 0).ebx,
                    _ => 0,
                }
            };
            Persist::Lines(if features & HAS_CLWB != 0 {
                LineFlush::WriteBack
            } else if features & HAS_CLFLUSHOPT != 0 {
                LineFlush::FlushOpt
            } else {
                LineFlush::Flush
            })
        }
        #[cfg(not(target_arch = "x86_64"))]
        Persist::Sync
    }

    /// The instructions, for display.
    pub(crate) fn describe(self) -> &'static str {
        match self {
            Persist::Stores => "plain stores",
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(LineFlush::WriteBack) => "clwb and sfence",
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(LineFlush::FlushOpt) => "clflushopt and sfence",
            #[cfg(target_arch = "x86_64")]
            Persist::Lines(LineFlush::Flush) => "clflush and sfence",
            #[cfg(not(target_arch = "x86_64"))]
            Persist::Sync => "msync",
        }
    }
}

#[cfg(target_arch = "x86_64")]
impl LineFlush {
    /// Begins to write back the lines of `len` bytes from `start` on; [`fence`] waits for them.
    ///
    /// # Safety
    ///
    /// The bytes must be mapped.
    #[inline]
    pub(crate) unsafe fn write_back(self, start: *const u8, len: usize) {
        use std::arch::asm;
        let end = start.wrapping_add(len);
        let mut line = start.map_addr(|address| address & !(LINE_BYTES - 1)).cast_mut();
        while line.cast_const() < end {
            // SAFETY: the instructions change no memory, registers or flags that the compiler uses,
            // and the address is mapped (a line never crosses a page). CPUID has reported the
            // chosen instruction.
            unsafe {
                match self {
                    LineFlush::WriteBack => {
                        asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                    LineFlush::FlushOpt => {
                        asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                    LineFlush::Flush => {
                        asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                }
            }
            line = line.wrapping_add(LINE_BYTES);
        }
    }
}

/// Waits until the lines whose write-back has begun have left the caches, and orders later stores
/// after them.
#[cfg(target_arch = "x86_64")]
#[inline]
pub(crate) fn fence() {
    // SAFETY: SSE is part of x86-64.
    unsafe { std::arch::x86_64::_mm_sfence() }
}
