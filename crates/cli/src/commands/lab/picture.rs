//! SVG as PNG.

use std::sync::Arc;

use resvg::{
    tiny_skia::{Pixmap, Transform},
    usvg::{Options, Tree, fontdb},
};

use crate::failure::{Code, Failure};

/// Pixels of the PNG for each one of the SVG: sharp on dense screens, and on paper.
const SCALE: f32 = 2.0;

/// The picture as PNG, with the fonts of this machine.
pub(super) fn png(svg: &str) -> Result<Vec<u8>, Failure> {
    let failed = |why: String| Failure::new(Code::Failed, format!("no PNG: {why}"));
    let mut fonts = fontdb::Database::new();
    fonts.load_system_fonts();
    if let Some(family) = sans_serif(&fonts) {
        fonts.set_sans_serif_family(family);
    }
    let options = Options { fontdb: Arc::new(fonts), ..Options::default() };
    let tree = Tree::from_str(svg, &options).map_err(|error| failed(error.to_string()))?;
    let size = tree.size();
    let pixels = |length: f32| (length * SCALE).ceil() as u32;
    let mut pixmap = Pixmap::new(pixels(size.width()), pixels(size.height()))
        .ok_or_else(|| failed("the picture is empty".to_owned()))?;
    resvg::render(&tree, Transform::from_scale(SCALE, SCALE), &mut pixmap.as_mut());
    pixmap.encode_png().map_err(|error| failed(error.to_string()))
}

/// The font for text without serifs: a common one if it is installed, else any. `None`: there is no
/// font, and the picture has no text.
fn sans_serif(fonts: &fontdb::Database) -> Option<String> {
    let installed = || fonts.faces().filter_map(|face| Some(face.families.first()?.0.clone()));
    ["DejaVu Sans", "Liberation Sans", "Noto Sans", "Arial"]
        .into_iter()
        .find_map(|common| installed().find(|family| family == common))
        .or_else(|| installed().next())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_becomes_a_png_of_twice_its_size() {
        let svg = r##"<svg xmlns="http://www.w3.org/2000/svg" width="20" height="10">
            <rect width="20" height="10" fill="#ff0000"/><text x="1" y="9">a</text></svg>"##;
        let png = png(svg).unwrap();
        assert_eq!(&png[1..4], b"PNG");
        // Width and height are in the header, big endian.
        assert_eq!((&png[16..20], &png[20..24]), (&[0, 0, 0, 40][..], &[0, 0, 0, 20][..]));
        assert!(super::png("<svg").is_err());
    }
}
