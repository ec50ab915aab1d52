use alloc::string::String;
use alloc::vec;
use alloc::vec::Vec;

use super::*;

/// A drive: its size, and the bytes on it that are not zero, each run as hexadecimal digits.
type Image = (u64, &'static [(u64, &'static str)]);

const MIB: u64 = 1 << 20;

/// The bytes around the signatures of images that the usual programs have made (mkfs.ext4, mkswap,
/// sfdisk, cryptsetup, pvcreate, and so on), and the name that is expected.
const IMAGES: &[(&str, Image)] = &[
    (
        "an ext2 file system",
        (
            64 * MIB,
            &[(
                1080,
                "53ef0100010000007a6f076b000000000000000001000000000000000b00000000010000380000000200000003000000",
            )],
        ),
    ),
    (
        "an ext3 file system",
        (
            64 * MIB,
            &[(
                1080,
                "53ef0100010000007a6f076b000000000000000001000000000000000b000000000100003c0000000200000003000000",
            )],
        ),
    ),
    (
        "an ext4 file system",
        (
            64 * MIB,
            &[(
                1080,
                "53ef0100010000007a6f076b000000000000000001000000000000000b000000000100003c000000c20200006b040000",
            )],
        ),
    ),
    (
        "an ext4 file system",
        (
            64 * MIB,
            &[(
                1080,
                "53ef0100010000007a6f076b000000000000000001000000000000000b0000000001000038000000c20200006b040000",
            )],
        ),
    ),
    (
        "an external journal of an ext4 file system",
        (
            64 * MIB,
            &[(
                1080,
                "53ef0100010000007a6f076b000000000000000001000000000000000b00000000010000000000000800000000040000",
            )],
        ),
    ),
    ("an XFS file system", (512 * MIB, &[(0, "58465342000010000000000000020000")])),
    ("a btrfs file system", (256 * MIB, &[(65600, "5f42485266535f4d")])),
    ("an F2FS file system", (256 * MIB, &[(1024, "1020f5f201000f00")])),
    ("an NTFS file system", (64 * MIB, &[(0, "eb52904e544653202020200010010000"), (510, "55aa")])),
    (
        "a FAT file system",
        (4 * MIB, &[(0, "eb3c906d6b66732e66617400"), (54, "4641543132202020"), (510, "55aa")]),
    ),
    (
        "a FAT file system",
        (64 * MIB, &[(0, "eb3c906d6b66732e66617400"), (54, "4641543136202020"), (510, "55aa")]),
    ),
    (
        "a FAT file system",
        (512 * MIB, &[(0, "eb58906d6b66732e66617400"), (82, "4641543332202020"), (510, "55aa")]),
    ),
    ("an exFAT file system", (64 * MIB, &[(0, "eb769045584641542020200000000000"), (510, "55aa")])),
    ("an ISO 9660 file system", (16 * MIB, &[(32768, "0143443030310100")])),
    ("a UDF file system", (64 * MIB, &[(32768, "0042454130310100")])),
    ("a NILFS2 file system", (256 * MIB, &[(1024, "0200000000003434180100")])),
    ("swap space", (64 * MIB, &[(4086, "53574150535041434532")])),
    ("a LUKS1 encrypted volume", (64 * MIB, &[(0, "4c554b53babe00016165730000000000")])),
    ("a LUKS2 encrypted volume", (64 * MIB, &[(0, "4c554b53babe00020000000000004000")])),
    (
        "an LVM2 physical volume",
        (64 * MIB, &[(512, "4c4142454c4f4e4501000000000000004639b73a200000004c564d3220303031")]),
    ),
    (
        "a bcache device",
        (
            64 * MIB,
            &[(
                4096,
                "1bf65e98ddf7a2e208000000000000000100000000000000c68573f64e1a45ca8265f57f48ba6d81",
            )],
        ),
    ),
    (
        "a GPT partition table",
        (
            64 * MIB,
            &[
                (446, "00000200eeffffff01000000ffff0100"),
                (510, "55aa4546492050415254000001005c000000"),
            ],
        ),
    ),
    (
        "a DOS partition table (MBR)",
        (64 * MIB, &[(446, "00202100832820080008000000f80100"), (510, "55aa")]),
    ),
    ("a Sun partition table", (64 * MIB, &[(508, "dabe12e1")])),
];

/// Content as its format describes it, where no image is at hand.
const DESCRIBED: &[(&str, Image)] = &[
    (MD, (64 * MIB, &[(64 * MIB - (64 << 10), "fc4e2ba9")])),
    // The drive does not end at a multiple of 64 KiB.
    (MD, (64 * MIB + (60 << 10), &[(64 * MIB - (64 << 10), "fc4e2ba9")])),
    (MD, (64 * MIB, &[(64 * MIB - 8192, "fc4e2ba901000000")])),
    (MD, (64 * MIB, &[(0, "fc4e2ba901000000")])),
    (MD, (64 * MIB, &[(4096, "fc4e2ba901000000")])),
    (GPT, (64 * MIB, &[(64 * MIB - 512, "4546492050415254")])),
    (GPT, (64 * MIB, &[(64 * MIB - 4096, "4546492050415254")])),
    (GPT, (64 * MIB, &[(446, "00000200eeffffff01000000ffff0100"), (510, "55aa")])),
    (ZFS, (64 * MIB, &[(128 << 10, "0cb1ba0000000000")])),
    (ZFS, (64 * MIB, &[((128 << 10) + 5120, "0000000000bab10c")])),
    (ZFS, (64 * MIB, &[(64 * MIB - (128 << 10), "0cb1ba0000000000")])),
    ("a boot sector", (64 * MIB, &[(510, "55aa")])),
    ("an ordering log of Rio", (64 * MIB, &[(0, "52494f204c4f4700")])),
    ("data of an unknown kind", (64 * MIB, &[(0, "01")])),
    ("data of an unknown kind", (64 * MIB, &[((256 << 10) - 1, "80")])),
    // The bytes of a signature in another place name nothing.
    ("data of an unknown kind", (64 * MIB, &[(8, "58465342")])),
];

fn bytes_of(hexadecimal: &str) -> Vec<u8> {
    let digits: Vec<u32> = hexadecimal.chars().map(|digit| digit.to_digit(16).unwrap()).collect();
    digits.chunks(2).map(|pair| (pair[0] * 16 + pair[1]) as u8).collect()
}

fn read((_, runs): &Image, blocks: Range<u64>) -> Vec<u8> {
    let start = blocks.start * BLOCK_BYTES as u64;
    let mut bytes = vec![0; (blocks.end - blocks.start) as usize * BLOCK_BYTES];
    for (offset, hexadecimal) in *runs {
        for (byte, at) in bytes_of(hexadecimal).into_iter().zip(*offset..) {
            if let Some(place) = at.checked_sub(start).and_then(|at| bytes.get_mut(at as usize)) {
                *place = byte;
            }
        }
    }
    bytes
}

fn content(image: &Image, max_bytes: u32) -> Option<String> {
    let mut probe = ContentProbe::new(image.0 / BLOCK_BYTES as u64, max_bytes);
    while let Some(blocks) = probe.next_read() {
        assert!(blocks.end - blocks.start <= u64::from(max_bytes).div_ceil(4096));
        probe.add(&read(image, blocks));
    }
    probe.content().map(|content| alloc::format!("{content}"))
}

#[test]
fn content_is_recognised_whatever_a_target_transfers_at_a_time() {
    for (name, image) in IMAGES.iter().chain(DESCRIBED) {
        for max_bytes in [1, 4096, 10 * 4096, u32::MAX] {
            assert_eq!(content(image, max_bytes).as_deref(), Some(*name), "{image:?}");
        }
    }
}

#[test]
fn a_drive_of_zeroes_holds_nothing_and_neither_does_what_lies_inside_it() {
    // Bytes in the middle of a drive may be left of anything.
    for runs in [&[][..], &[(1 << 20, "53ef")], &[(64 * MIB - (129 << 10), "fc4e2ba9")]] {
        assert_eq!(content(&(64 * MIB, runs), u32::MAX), None);
    }
}

/// The identity of a drive outlives its volumes (T27).
#[test]
fn t27_the_identity_of_a_drive_is_no_content_and_is_not_erased() {
    let with_identity: Image = (64 * MIB, &[(8192, "52494f4452495645")]);
    for max_bytes in [4096, u32::MAX] {
        assert_eq!(content(&with_identity, max_bytes), None);
    }
    let elsewhere: Image = (64 * MIB, &[(12288, "52494f4452495645")]);
    assert!(content(&elsewhere, u32::MAX).is_some());
    let wiped = |keeps_identity| -> Vec<u64> {
        wiped_ranges(16 << 10, 20 * 4096, keeps_identity).flatten().collect()
    };
    assert_eq!(wiped(false)[0], RECORD_BLOCK);
    assert_eq!(wiped(true), wiped(false)[1..]);
}

#[test]
fn what_encloses_other_content_is_named() {
    let ext4_on_raid: Image = (64 * MIB, &[(1080, "53ef"), (64 * MIB - 8192, "fc4e2ba9")]);
    assert_eq!(content(&ext4_on_raid, u32::MAX).as_deref(), Some(MD));
    let fat_with_gpt: Image = (64 * MIB, &[(54, "4641543136202020"), (512, "4546492050415254")]);
    assert_eq!(content(&fat_with_gpt, u32::MAX).as_deref(), Some(GPT));
}

/// The blocks that are zeroed, and those of the labels, are all in which a signature may lie.
#[test]
fn no_signature_remains() {
    for blocks in [272, 448, 449, 16 << 10] {
        let mut wiped: Vec<bool> = vec![false; blocks as usize];
        wiped[..LABEL_BLOCKS as usize].fill(true);
        for range in wiped_ranges(blocks, 20 * 4096, false) {
            assert!(!range.is_empty() && range.end - range.start <= 20);
            for block in range {
                assert!(!core::mem::replace(&mut wiped[block as usize], true), "{block} twice");
            }
        }
        let len = blocks * BLOCK_BYTES as u64;
        for (at, _, name) in SIGNATURES {
            let block = at.offset(len).unwrap() / BLOCK_BYTES as u64;
            assert!(wiped[block as usize], "{name} stays in block {block} of {blocks}");
        }
        let kept = wiped.iter().filter(|is_wiped| !**is_wiped).count() as u64;
        assert_eq!(kept, (blocks - DATA_START).saturating_sub(WIPED_TAIL_BLOCKS));
    }
}
