//! The hashes of names, by which a hash tree is ordered.
//!
//! There are three functions: legacy, half MD4 and TEA. Each treats the bytes of a name as signed
//! or as unsigned numbers; the superblock records the kind that the machine of `mke2fs` had.

use crate::block::Ino;
use crate::error::FsError;
use crate::format::layout::Layout;

/// The initial state of MD4. It is used if the seed of the file system is zero.
const DEFAULT_SEED: [u32; 4] = [0x6745_2301, 0xefcd_ab89, 0x98ba_dcfe, 0x1032_5476];

/// The kernel marks the end of a directory with this hash, so no name may have it.
const END: u32 = 0x7fff_ffff << 1;

/// The function, as the root of a hash tree records it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Function {
    Legacy = 0,
    HalfMd4 = 1,
    Tea = 2,
}

/// Hashes the names of one directory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Hasher {
    pub(super) function: Function,
    unsigned: bool,
    seed: [u32; 4],
}

/// The hash of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NameHash {
    /// The order in the tree. The lowest bit is zero.
    pub(super) major: u32,
    /// Distinguishes most names with the same `major`.
    pub(super) minor: u32,
}

impl Hasher {
    /// The hash of new trees, and of directories of one block, which may become trees.
    pub(super) fn of_new(layout: &Layout) -> Self {
        let function = match layout.hash_version % 3 {
            0 => Function::Legacy,
            1 => Function::HalfMd4,
            _ => Function::Tea,
        };
        Self::new(layout, function)
    }

    /// The hash of a tree whose root has `version`.
    pub(super) fn of_root(layout: &Layout, ino: Ino, version: u8) -> Result<Self, FsError> {
        let function = match version {
            0 => Function::Legacy,
            1 => Function::HalfMd4,
            2 => Function::Tea,
            _ => return Err(FsError::DamagedInode { what: "hash version of the directory", ino }),
        };
        Ok(Self::new(layout, function))
    }

    fn new(layout: &Layout, function: Function) -> Self {
        let seed = if layout.hash_seed == [0; 4] { DEFAULT_SEED } else { layout.hash_seed };
        Self { function, unsigned: layout.hash_version >= 3, seed }
    }

    /// The hash of `name`.
    pub(super) fn hash(&self, name: &[u8]) -> NameHash {
        if self.unsigned { self.compute::<false>(name) } else { self.compute::<true>(name) }
    }

    fn compute<const SIGNED: bool>(&self, name: &[u8]) -> NameHash {
        let (major, minor) = match self.function {
            // The format has no minor hash here; only the order of a scan uses this one.
            Function::Legacy => (legacy::<SIGNED>(name), self.half_md4::<SIGNED>(name).1),
            Function::HalfMd4 => self.half_md4::<SIGNED>(name),
            Function::Tea => self.tea::<SIGNED>(name),
        };
        let major = major & !1;
        #[cfg(test)]
        let (major, minor) = weaken(self.seed, major, minor);
        NameHash { major: if major == END { END - 2 } else { major }, minor }
    }

    /// The first hash and the second one.
    fn half_md4<const SIGNED: bool>(&self, name: &[u8]) -> (u32, u32) {
        let mut state = self.seed;
        let mut rest = name;
        while !rest.is_empty() {
            half_md4_transform(&mut state, &words::<8, SIGNED>(rest));
            rest = rest.get(32..).unwrap_or_default();
        }
        (state[1], state[2])
    }

    fn tea<const SIGNED: bool>(&self, name: &[u8]) -> (u32, u32) {
        let mut state = [self.seed[0], self.seed[1]];
        let mut rest = name;
        while !rest.is_empty() {
            tea_transform(&mut state, &words::<4, SIGNED>(rest));
            rest = rest.get(16..).unwrap_or_default();
        }
        (state[0], state[1])
    }
}

/// With this seed, tests get only four first hashes, so that names collide.
#[cfg(test)]
pub(super) const WEAK_SEED: [u32; 4] = [0x7765_616b, 1, 1, 1];

/// With this seed, tests get only a few first and second hashes.
#[cfg(test)]
pub(super) const WEAKEST_SEED: [u32; 4] = [0x7765_616b, 2, 2, 2];

#[cfg(test)]
fn weaken(seed: [u32; 4], major: u32, minor: u32) -> (u32, u32) {
    match seed {
        WEAK_SEED => (major & 0x6000_0000, minor),
        WEAKEST_SEED => (major & 0x6000_0000, minor & 0xfff),
        _ => (major, minor),
    }
}

/// A byte as a number of 32 bits.
const fn widen<const SIGNED: bool>(byte: u8) -> u32 {
    if SIGNED { byte.cast_signed() as i32 as u32 } else { byte as u32 }
}

/// The next `N` words of a name. A name that ends earlier is filled with its length.
fn words<const N: usize, const SIGNED: bool>(rest: &[u8]) -> [u32; N] {
    // Names have 255 bytes at most.
    let length = rest.len() as u32;
    let pad = length | length << 8;
    let pad = pad | pad << 16;
    let mut words = [pad; N];
    for (word, bytes) in words.iter_mut().zip(rest.chunks(4)) {
        for &byte in bytes {
            *word = (*word << 8).wrapping_add(widen::<SIGNED>(byte));
        }
    }
    words
}

fn legacy<const SIGNED: bool>(name: &[u8]) -> u32 {
    let (mut last, mut before) = (0x12a3_fe2d_u32, 0x37ab_e8f9_u32);
    for &byte in name {
        let mixed = last ^ widen::<SIGNED>(byte).wrapping_mul(7_152_373);
        let mut next = before.wrapping_add(mixed);
        if next & 0x8000_0000 != 0 {
            next = next.wrapping_sub(0x7fff_ffff);
        }
        before = last;
        last = next;
    }
    last << 1
}

/// MD4 with half of its steps.
fn half_md4_transform(state: &mut [u32; 4], x: &[u32; 8]) {
    const ROUND_2: u32 = 0x5a82_7999;
    const ROUND_3: u32 = 0x6ed9_eba1;
    let [mut a, mut b, mut c, mut d] = *state;
    let choose = |x: u32, y: u32, z: u32| z ^ (x & (y ^ z));
    let majority = |x: u32, y: u32, z: u32| (x & y).wrapping_add((x ^ y) & z);
    let parity = |x: u32, y: u32, z: u32| x ^ y ^ z;
    macro_rules! four {
        ($f:ident, $key:expr, [$w0:expr, $w1:expr, $w2:expr, $w3:expr], [$s0:expr, $s1:expr, $s2:expr, $s3:expr]) => {
            a = step(a, $f(b, c, d), x[$w0], $key, $s0);
            d = step(d, $f(a, b, c), x[$w1], $key, $s1);
            c = step(c, $f(d, a, b), x[$w2], $key, $s2);
            b = step(b, $f(c, d, a), x[$w3], $key, $s3);
        };
    }
    four!(choose, 0, [0, 1, 2, 3], [3, 7, 11, 19]);
    four!(choose, 0, [4, 5, 6, 7], [3, 7, 11, 19]);
    four!(majority, ROUND_2, [1, 3, 5, 7], [3, 5, 9, 13]);
    four!(majority, ROUND_2, [0, 2, 4, 6], [3, 5, 9, 13]);
    four!(parity, ROUND_3, [3, 7, 2, 6], [3, 9, 11, 15]);
    four!(parity, ROUND_3, [1, 5, 0, 4], [3, 9, 11, 15]);
    for (word, new) in state.iter_mut().zip([a, b, c, d]) {
        *word = word.wrapping_add(new);
    }
}

const fn step(word: u32, mixed: u32, input: u32, key: u32, rotate: u32) -> u32 {
    word.wrapping_add(mixed).wrapping_add(input).wrapping_add(key).rotate_left(rotate)
}

/// TEA with 16 rounds; the name is the key.
fn tea_transform(state: &mut [u32; 2], key: &[u32; 4]) {
    let [mut a, mut b] = *state;
    let mix = |v: u32, sum: u32, k0: u32, k1: u32| {
        (v << 4).wrapping_add(k0) ^ v.wrapping_add(sum) ^ (v >> 5).wrapping_add(k1)
    };
    let mut sum = 0_u32;
    for _ in 0..16 {
        sum = sum.wrapping_add(0x9e37_79b9);
        a = a.wrapping_add(mix(b, sum, key[0], key[1]));
        b = b.wrapping_add(mix(a, sum, key[2], key[3]));
    }
    state[0] = state[0].wrapping_add(a);
    state[1] = state[1].wrapping_add(b);
}

#[cfg(test)]
mod tests {
    use alloc::string::String;
    use alloc::vec::Vec;
    use alloc::{format, vec};
    use std::io::Write;
    use std::process::Command;

    use super::*;
    use crate::testing;

    /// Bytes that a command line of debugfs passes on as they are.
    const PLAIN: &[u8] = b"abcdefghijklmnopqrstuvwxyz0123456789-_.\xc3\xa4\xff\x80\xfe\x7f\xe2\x82";

    fn names() -> Vec<Vec<u8>> {
        let mut names: Vec<Vec<u8>> = Vec::new();
        let mut state = 1_u64;
        for round in 0..3 {
            for length in 1..=255_usize {
                let mut name = vec![b'n'];
                while name.len() < length {
                    state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(round);
                    name.push(PLAIN[(state >> 33) as usize % PLAIN.len()]);
                }
                names.push(name);
            }
        }
        names
    }

    fn debugfs_hashes(version: u8, seed: &[u32; 4], names: &[Vec<u8>]) -> Vec<(u32, u32)> {
        let bytes: Vec<u8> = seed.iter().flat_map(|word| word.to_le_bytes()).collect();
        let hex: Vec<String> = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        let hex = hex.concat();
        let uuid = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-");
        let mut script = tempfile::NamedTempFile::new().unwrap();
        for name in names {
            write!(script, "dx_hash -h {version} -s {uuid} ").unwrap();
            script.write_all(name).unwrap();
            script.write_all(b"\n").unwrap();
        }
        script.flush().unwrap();
        let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap());
        let output =
            Command::new("debugfs").env("PATH", path).arg("-f").arg(script.path()).output();
        let output = output.expect("debugfs of e2fsprogs runs").stdout;
        // "Hash of NAME is 0xabcdef01 (minor 0x12345678)"
        let lines = output.split(|&byte| byte == b'\n').filter(|line| line.starts_with(b"Hash of"));
        lines
            .map(|line| {
                let text = String::from_utf8_lossy(line);
                let numbers = text.rsplit_once(" is 0x").unwrap().1;
                let (major, minor) =
                    numbers.trim_end_matches(')').split_once(" (minor 0x").unwrap();
                let parse = |text: &str| u32::from_str_radix(text, 16).unwrap();
                (parse(major), parse(minor))
            })
            .collect()
    }

    #[test]
    fn hashes_are_those_of_e2fsprogs() {
        let names = names();
        for seed in [[0; 4], [0x8765_4321, 2, 0xffff_ffff, 0x1234_5678]] {
            for version in 0..6 {
                let layout = Layout { hash_seed: seed, hash_version: version, ..testing::layout() };
                let hasher = Hasher::of_new(&layout);
                let expected = debugfs_hashes(version, &seed, &names);
                assert_eq!(expected.len(), names.len());
                for (name, (major, minor)) in names.iter().zip(expected) {
                    let hash = hasher.hash(name);
                    assert_eq!(hash.major, major, "{name:?} version {version}");
                    if version % 3 != 0 {
                        assert_eq!(hash.minor, minor, "{name:?} version {version}");
                    }
                }
            }
        }
    }
}
