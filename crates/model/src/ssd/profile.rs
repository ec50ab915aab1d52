//! The fixed numbers of the modelled drives. Section "Profiles" of docs/media.md has the source of
//! each. A number changes only together with that document, and never to improve a benchmark.

/// The properties of a modelled drive. Times are in ns; a block is 4096 bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profile {
    /// Its name in a specification: `ssd:NAME,…`.
    pub name: &'static str,
    /// The real drive with these properties.
    pub like: &'static str,
    /// Power-loss protection: a completed write is durable, and FLUSH has nothing to do.
    pub plp: bool,
    /// The controller accepts at most one read command per this time.
    pub read_command_ns: u64,
    /// The controller accepts at most one write (or other) command per this time.
    pub write_command_ns: u64,
    /// Transfer time of one block on the link, which reads and writes share.
    pub link_block_ns: u64,
    /// Average time from a write's arrival in the cache to its completion.
    pub write_latency_ns: u64,
    /// Width of the uniform spread around `write_latency_ns`. By the spread, writes complete out of
    /// order.
    pub write_spread_ns: u64,
    /// Time from the end of a read's work on the medium to its completion.
    pub read_latency_ns: u64,
    /// Number of parts of the medium (dies) that work in parallel.
    pub units: u64,
    /// Time for which a read occupies one unit.
    pub read_unit_ns: u64,
    /// Number of blocks that one read of a unit returns (a flash page).
    pub read_unit_blocks: u64,
    /// Time for which a program operation occupies one unit.
    pub program_ns: u64,
    /// Number of blocks that one program operation writes.
    pub program_blocks: u64,
    /// Number of blocks in the write buffer that wait to be programmed.
    pub cache_blocks: u64,
    /// Time of a FLUSH when no block waits to be programmed.
    pub flush_base_ns: u64,
    /// The drive accepts nothing while it executes a FLUSH.
    pub flush_blocks_all: bool,
    /// Largest number of completed blocks that a power cut can still lose. Older blocks count as
    /// durable. 0 with power-loss protection.
    pub losable_blocks: u64,
}

impl Profile {
    /// One block's share of the programming time, in ns: the write buffer drains one block per this
    /// time.
    pub fn drain_block_ns(&self) -> u64 {
        self.program_ns / (self.units * self.program_blocks)
    }

    /// The profile with name `name`, if there is one.
    pub fn named(name: &str) -> Option<&'static Profile> {
        [&FLASH, &OPTANE].into_iter().find(|profile| profile.name == name)
    }
}

/// Flash without power-loss protection: the Samsung PM981 of the paper (§6.1), the retail 970 EVO.
pub const FLASH: Profile = Profile {
    name: "flash",
    like: "Samsung PM981 1 TB",
    plp: false,
    read_command_ns: 2_000,
    write_command_ns: 2_222,
    link_block_ns: 1_205,
    write_latency_ns: 17_778,
    write_spread_ns: 7_300,
    read_latency_ns: 4_667,
    units: 32,
    read_unit_ns: 60_000,
    read_unit_blocks: 4,
    program_ns: 436_992,
    program_blocks: 8,
    cache_blocks: 8_192,
    flush_base_ns: 1_720_000,
    flush_blocks_all: true,
    losable_blocks: 32_768,
};

/// 3D XPoint, where a completed write is durable: the Intel Optane P4800X of the paper (§6.1),
/// sibling of its 905P.
pub const OPTANE: Profile = Profile {
    name: "optane",
    like: "Intel Optane P4800X",
    plp: true,
    read_command_ns: 1_818,
    write_command_ns: 2_000,
    link_block_ns: 1_707,
    write_latency_ns: 8_000,
    write_spread_ns: 1_000,
    read_latency_ns: 1_900,
    units: 28,
    read_unit_ns: 5_182,
    read_unit_blocks: 1,
    program_ns: 57_344,
    program_blocks: 1,
    cache_blocks: 256,
    flush_base_ns: 10_000,
    flush_blocks_all: false,
    losable_blocks: 0,
};

#[cfg(test)]
mod tests {
    use super::*;

    /// The published figures that must follow from the numbers above (docs/media.md).
    #[test]
    fn the_numbers_give_the_published_figures() {
        let per_second = |ns: u64| 1_000_000_000 / ns;
        let near = |value: u64, published: u64| value.abs_diff(published) * 50 <= published;

        assert!(near(per_second(FLASH.write_command_ns), 450_000));
        assert!(near(per_second(FLASH.read_command_ns), 500_000));
        assert!(near(4096 * 1_000 / FLASH.link_block_ns, 3_400), "MB/s");
        assert!(near(4096 * 1_000 / FLASH.drain_block_ns(), 2_400), "MB/s");
        assert!(near(per_second(FLASH.write_command_ns + FLASH.write_latency_ns), 50_000));
        assert!(near(
            per_second(FLASH.read_command_ns + FLASH.read_unit_ns + FLASH.read_latency_ns),
            15_000
        ));
        assert!(near(
            per_second(FLASH.write_command_ns + FLASH.write_latency_ns + FLASH.flush_base_ns),
            574
        ));

        assert!(near(per_second(OPTANE.write_command_ns), 500_000));
        assert!(near(per_second(OPTANE.read_command_ns), 550_000));
        assert!(near(4096 * 1_000 / OPTANE.link_block_ns, 2_400), "MB/s");
        assert!(near(4096 * 1_000 / OPTANE.drain_block_ns(), 2_000), "MB/s");
        assert_eq!(OPTANE.write_command_ns + OPTANE.write_latency_ns, 10_000);
        assert!(near(OPTANE.read_command_ns + OPTANE.read_unit_ns + OPTANE.read_latency_ns, 8_900));
    }

    #[test]
    fn found_by_name() {
        assert_eq!(Profile::named("flash"), Some(&FLASH));
        assert_eq!(Profile::named("optane"), Some(&OPTANE));
        assert_eq!(Profile::named("floppy"), None);
    }
}
